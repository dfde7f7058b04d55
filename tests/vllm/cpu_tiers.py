"""vLLM's offloading tiers on a CPU. vLLM 0.32 has all but the copies, which need a GPU.

The scheduler, the names of files and the tier in files are vLLM's own. This module is the
`spec_module_path` of `kv_connector_extra_config`.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CPUTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CPUWorker(kv_caches, region)
        return self._worker


class CPUWorker(OffloadingWorker):
    def __init__(self, kv_caches, region):
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._blocks = [cache.tensor for cache in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def _copy(self, job_id, block_spec, chunks, *, is_store):
        start = 0
        for refs, size in zip(self._groups, block_spec.group_sizes, strict=True):
            block_ids = block_spec.block_ids[start : start + size]
            chunk_ids = chunks[start : start + size]
            start += size
            for ref in refs:
                block_rows = self._blocks[ref.tensor_idx]
                chunk_rows = self._chunks[ref.tensor_idx]
                if is_store:
                    chunk_rows[chunk_ids] = block_rows[block_ids]
                else:
                    block_rows[block_ids] = chunk_rows[chunk_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self):
        finished = self._finished
        self._finished = []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._region.cleanup()
