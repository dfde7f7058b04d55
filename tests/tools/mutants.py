"""Mutation test: `make mutants` applies named faults to the package, and the tests must fail.

    python -m tests.tools.mutants [--only NAME ...] [--jobs N]

Each mutant replaces one piece of text in a copy of the repository. The test files that it names
run first, up to the first failure. If they pass, the whole fast tier runs, and then the full tier.
The command fails if the named tests fail without a mutation, if a mutant cannot be imported, if a
mutant survives the full tier, or if more than `MAX_SURVIVORS` mutants survive the fast tier.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "dist", "__pycache__")
# Maximum number of mutants that survive the fast tier.
MAX_SURVIVORS = 3
PYTEST_SECONDS = 1800.0  # time limit of a run of pytest
FAST_TIER = ("-n", "2", "--dist", "worksteal")
FULL_TIER = (*FAST_TIER, "-m", "", "--hypothesis-profile=full")


class Mutant(NamedTuple):
    """A fault: `new` replaces the only `old` in `file` of the package. Then `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# Files with several mutants, relative to the package.
REFERENCE, CODEC = "ops/reference.py", "formats/codec.py"
TABLE, GROUP = "paging/block_table.py", "paging/layer_group.py"
TORCH, WRITE = "ops/torch/backend.py", "ops/triton/write.py"
DECODE, SOFTMAX = "ops/triton/decode.py", "ops/triton/softmax.py"
ATTENTION = "ops/triton/attention.py"

MUTANTS = (
    # The specification.
    Mutant(
        "codec: large values wrap", CODEC,
        "code.clamp(max=fmt.max_code >> unused_bits)", "(code & 0x7F)",
        "tests/formats/test_codec.py",
    ),
    Mutant(
        "codec: NaN is swallowed", CODEC,
        "    code = torch.where(magnitude > 0x7F800000, fmt.nan_code, code)\n", "",
        "tests/formats/test_codec.py",
    ),
    Mutant(
        "codec: ties round up", CODEC,
        "offset + ((unrounded >> shift) & 1)) >> shift", "offset + 1) >> shift",
        "tests/formats/test_codec.py",
    ),
    Mutant(
        "codec: dynamic scales round down", CODEC,
        "(scale.view(torch.int32) + 0xFFFF) >> 16", "scale.view(torch.int32) >> 16",
        "tests/formats/test_codec.py",
    ),
    Mutant(
        "codec: the worst scale of K is chosen", CODEC, "cost.argmin(-1", "cost.argmax(-1",
        "tests/formats/test_search_scale.py",
    ),
    Mutant(
        "rotation is not orthonormal", "formats/rotation.py",
        "float(block**-0.5)", "float(block**-0.25)", "tests/formats/test_rotation.py",
    ),
    Mutant(
        "static scales of E3M4 are not converted", "formats/__init__.py",
        '0x7F, 0x80, 31.0, 448.0 / 31.0, has', '0x7F, 0x80, 31.0, 1.0, has',
        "tests/formats/test_codec.py tests/scales/test_scales.py",
    ),
    Mutant(
        "reference: K and V scales swapped", REFERENCE,
        "enumerate((k_scales, v_scales))", "enumerate((v_scales, k_scales))",
        "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: V's scale doubled", REFERENCE,
        "x *= scales[:, :, span, None].float()",
        'x *= scales[:, :, span, None].float() * (1 + (side == "v"))',
        "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: the center is not added back", REFERENCE,
        "        x += stored_side.center[:, None]", "        pass", "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: K stays rotated", REFERENCE,
        "    if stored_side.rotated:\n        x = rotate(x)\n    if stored_side.center",
        "    if stored_side.center", "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: the static scale multiplies twice", REFERENCE,
        "encode(x * stored_side.static_scale.reciprocal()[:, None], fmt)",
        "encode(x * stored_side.static_scale[:, None], fmt)", "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: sinks are ignored", REFERENCE,
        "    if spec.sinks is not None:", "    if False:", "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: bytes of hidden tokens count", REFERENCE,
        "    v = v.masked_fill(~is_visible.any(2)[..., None], 0)\n", "", "tests/ops/test_ops.py",
    ),
    Mutant(
        "reference: a write without a page is silent", REFERENCE,
        "        raise_overrun(pages, lengths, num_tokens)", "        pass",
        "tests/ops/test_ops.py",
    ),
    Mutant(
        "window: off by one", "ops/visibility.py",
        "return query_position - window + 1", "return query_position - window",
        "tests/ops/test_ops.py tests/cache/test_windows.py",
    ),
    Mutant(
        "causal: a token does not attend to itself", "ops/visibility.py",
        "(positions <= query_positions)", "(positions < query_positions)", "tests/ops/test_ops.py",
    ),
    # The torch backend.
    Mutant(
        "torch: the last page is dropped", TORCH,
        "min(aligned_start + chunk_size, visible_stop)",
        "min(aligned_start + chunk_size, visible_stop - visible_stop % pages.page_size)",
        "tests/ops/test_ops.py",
    ),
    Mutant(
        "torch: the output stays rotated", TORCH,
        "        out = rotate(out)", "        pass", "tests/ops/test_ops.py",
    ),
    Mutant(
        "torch: softcap is ignored", TORCH,
        "logits = torch.tanh(logits / spec.softcap) * spec.softcap", "pass",
        "tests/ops/test_ops.py",
    ),
    Mutant(
        "torch: older sums do not fade", TORCH, "        out *= rescaling\n", "",
        "tests/ops/test_ops.py",
    ),
    # The Triton kernels, in the interpreter.
    Mutant(
        "triton: the first new token is lost", WRITE,
        "is_new = (t >= 0) & (t < num_tokens)", "is_new = (t > 0) & (t < num_tokens)",
        "tests/ops/test_kernels_write.py",
    ),
    Mutant(
        "triton: K and V scales swapped", WRITE,
        "(1 if IS_V else 0)", "(0 if IS_V else 1)", "tests/ops/test_kernels_write.py",
    ),
    Mutant(
        "triton: tokens past the limit are stored", WRITE,
        "    is_new &= position < limit\n", "", "tests/ops/test_kernels_write.py",
    ),
    Mutant(
        "triton: a token lost at a page boundary", WRITE,
        "slot = position % PAGE", "slot = (position + 1) % PAGE", "tests/ops/test_kernels_write.py",
    ),
    Mutant(
        "triton: quarters of packed codes change places", "ops/triton/codec.py",
        "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "layout: the first channel in the highest bits", "ops/page_layout.py",
        "parts[::-1])", "parts)", "tests/ops/test_cpu.py",
    ),
    Mutant(
        "triton: the newest token is not read", ATTENTION,
        "end = tl.minimum(end, rows.last_q + 1)", "end = tl.minimum(end, rows.last_q)",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "triton: window off by one", SOFTMAX,
        "return q_position - window", "return q_position - window - 1",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "triton: V's scale is not applied", SOFTMAX,
        "        weights *= per_column(v_scale, SWAPPED)", "        pass",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "triton: splits are merged without their weight", DECODE,
        "tl.sum(part_acc * weight[:, None], 0)", "tl.sum(part_acc, 0)",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "triton: splits after the first 32 are not merged", DECODE,
        "range(0, num_parts, PARTS_AT_ONCE)",
        "range(0, tl.minimum(num_parts, PARTS_AT_ONCE), PARTS_AT_ONCE)",
        "tests/ops/test_kernels_attention.py",
    ),
    # The C++ kernels.
    Mutant(
        "cpu: the last page is dropped", "ops/cpu/kernels.cpp",
        "begin = c.start, end = c.stop",
        "begin = c.start, end = (c.stop - 1) / c.table.page_size * c.table.page_size",
        "tests/ops/test_ops.py tests/ops/test_cpu.py",
    ),
    Mutant(
        "cpu: a token lost at a page boundary", "ops/cpu/kernels.cpp",
        "page = c.table.find_page(sequence, position);",
        "page = c.table.find_page(sequence, position - token);",
        "tests/ops/test_ops.py tests/ops/test_cpu.py",
    ),
    Mutant(
        "cpu: spans are added as threads split them", "ops/cpu/kernels.cpp",
        "min((tile_begin / c.span + 1) * c.span, end)", "end",
        "tests/ops/test_cpu.py tests/reproducible/test_deterministic.py",
    ),
    # Deterministic models.
    Mutant(
        "deterministic: rows in one product", "attention/deterministic.py",
        "in rows.split(BLOCK_ROWS, axis)", "in [rows.narrow(axis, 0, num_rows)]",
        "tests/reproducible/test_deterministic.py",
    ),
    Mutant(
        "deterministic: a plan splits a sequence", DECODE,
        "split=not spec.deterministic", "split=True",
        "tests/ops/test_kernels_attention.py",
    ),
    Mutant(
        "plan: centers may be missing", "cache/options.py",
        "any(plan.k.centered for plan in plans)", "False", "tests/cache/test_default.py",
    ),
    # Pages.
    Mutant(
        "fork: the copy is skipped", GROUP,
        "if pool.is_allocated and len(copies[0]):", "if pool.is_allocated and not len(copies[0]):",
        "tests/cache/test_machine.py",
    ),
    Mutant(
        "fork: a shared page is written", TABLE,
        "if references[page] > counts[page]:", "if references[page] > counts[page] + 1:",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "fork: a full page is copied", TABLE, "first_column = start // self.page_size\n",
        "first_column = max(start - 1, 0) // self.page_size\n", "tests/paging/test_block_table.py",
    ),
    Mutant(
        "fork: a failed copy keeps its page", TABLE,
        "            self.allocator.free(new_pages)\n            raise", "            raise",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "crop: the last page is dropped", TABLE,
        "max(self._count_pages(length), self.first", "max(length // self.page_size, self.first",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "window: a visible page is released", TABLE,
        "first_kept = min(token // self.page_size", "first_kept = min(-(-token // self.page_size)",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "beams: pages are freed while in use", TABLE,
        "        self.allocator.share(rows[:, first_page:])\n", "",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "budget: one page too many", "paging/page_allocator.py",
        "self.num_held + num_pages > self.max_pages",
        "self.num_held + num_pages > self.max_pages + 1",
        "tests/paging/test_block_table.py",
    ),
    Mutant(
        "pool: growth loses the first block", "paging/memory_blocks.py",
        "[*old_blocks, *self._allocate", "[*old_blocks[1:], *self._allocate",
        "tests/paging/test_page_pool.py",
    ),
    Mutant(
        "window: a long call keeps one page too few", GROUP,
        "return min(self.find_window_start(length), length - 1) // self.page_size * self.page_size",
        "return (length - 1) // self.page_size * self.page_size",
        "tests/cache/test_machine.py",
    ),
    Mutant(
        "window: a long call reads zeros before it", "cache/layer_storage.py",
        "block[:, :num_old] = old_rows.unflatten(0, (batch, num_old))", "pass",
        "tests/prefix/test_reuse.py",
    ),
    # The cache.
    Mutant(
        "crop: one token too few", GROUP,
        "max(self.lengths[member] - num_tokens, 0)",
        "max(self.lengths[member] - max(num_tokens - 1, 0), 0)",
        "tests/cache/test_machine.py",
    ),
    Mutant(
        "beams: the order is ignored", "cache/cache.py",
        "self._paged.select(sequences)", "self._paged.select(torch.arange(len(sequences)))",
        "tests/cache/test_machine.py",
    ),
    Mutant(
        "update: a failed step is not undone", "cache/cache.py",
        "            self._undo_step(layer_idx, key_states.shape[-2], error)\n", "",
        "tests/cache/test_machine.py",
    ),
    Mutant(
        "save: centers are lost", "cache/serialization.py",
        '"k_center": layer.k_center}', '"k_center": None}', "tests/cache/test_golden_files.py",
    ),
    Mutant(
        "load: another version is accepted", "cache/serialization.py",
        'version = header.get("format"), header.get("version")',
        'version = header.get("format"), str(VERSION)', "tests/cache/test_golden_files.py",
    ),
    Mutant(
        "prefix store: the digest is not checked", "prefix/file.py",
        'if header.pop("digest") != compute_digest(header, rows):',
        'if not header.pop("digest"):',
        "tests/prefix/test_store.py tests/prefix/test_folder.py",
    ),
    Mutant(
        "prefix store: keys ignore the tokens before", "prefix/file.py",
        "previous_bytes = digest.digest()", "previous_bytes = previous_bytes",
        "tests/prefix/test_store.py",
    ),
    Mutant(
        "prefix store: the lock is not taken", "prefix/folder.py",
        "                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "",
        "tests/prefix/test_folder.py tests/prefix/test_store.py",
    ),
    Mutant(
        "offloading: writes do not wait for copies", "paging/offloading.py",
        "            self.wait()\n            self.device_blocks.put(pages, rows)",
        "            self.device_blocks.put(pages, rows)",
        "tests/cache/test_offloading.py",
    ),
    Mutant(
        "offloading: pages come back stale", "paging/memory_blocks.py",
        "target_rows.copy_(source_rows, non_blocking=not blocking)",
        "target_rows[:-1].copy_(source_rows[:-1], non_blocking=not blocking)",
        "tests/cache/test_offloading.py tests/paging/test_page_pool.py",
    ),
    # Attention.
    Mutant(
        "attention: the layer's window is ignored", "attention/fp8_paged.py",
        "bounds = None\n    window = spec.window or key.window\n",
        "bounds = None\n    window = spec.window\n", "tests/cache/test_windows.py",
    ),
    Mutant(
        "attention: training through pages is silent", "attention/fp8_paged.py",
        "            if query.requires_grad and module.training:", "            if False:",
        "tests/attention/test_interruptions.py",
    ),
    Mutant(
        "sizes: a mask of another size is accepted", "ops/sizes.py",
        "if not has_shape or not has_dtype or tensor.device", "if not has_dtype or tensor.device",
        "tests/ops/test_ops.py tests/attention/test_masks.py",
    ),
    Mutant(
        "latents: absorbed without the positions", "ops/torch/backend.py",
        "torch.cat([keys, values], -1), keys", "torch.cat([keys, 0 * values], -1), keys",
        "tests/attention/test_latent.py tests/ops/test_ops.py",
    ),
    # Scales and calibration.
    Mutant(
        "scales: every rank takes the first heads", "scales/kv_scales.py",
        "return slice(tp_rank * num_heads, (tp_rank + 1) * num_heads)",
        "return slice(0, num_heads)", "tests/scales/test_scales.py",
    ),
    Mutant(
        "scales: NaN is accepted", "scales/layer_scales.py",
        "is_valid = (values >= MIN_SCALE) & (values <= _MAX_SCALE)",
        "is_valid = ~((values < MIN_SCALE) | (values > _MAX_SCALE))", "tests/scales/test_scales.py",
    ),
    Mutant(
        "scales: one side stands for both", "scales/formats/base.py",
        "            k = v = torch.maximum(k, v)", "            v = k",
        "tests/scales/test_export.py",
    ),
    Mutant(
        "scales: no room for a dropped center", "scales/formats/base.py",
        "k = k + (headroom if k.ndim else headroom.max())", "k = k + 0 * headroom.max()",
        "tests/scales/test_export.py",
    ),
    Mutant(
        "calibration: scales ignore the center", "calibration/static_scales.py",
        "center_and_rotate(k, center, rotated",
        "center_and_rotate(k, None, rotated",
        "tests/calibration/test_calibrate.py",
    ),
    Mutant(
        "calibration: the costliest scale of a head is chosen", "calibration/static_scales.py",
        "steps = costs.argmin(0)", "steps = costs.argmax(0)",
        "tests/calibration/test_calibrate.py",
    ),
    Mutant(
        "calibration: scales hold only the last window", "calibration/static_scales.py",
        "            if (old_amax := layer_amax.get(index)) is not None:", "            if False:",
        "tests/calibration/test_calibrate.py",
    ),
    # Serving.
    Mutant(
        "serving: a step does not wait for its inputs", "serving/fp8_manager.py",
        "        order_streams(processor.inputs_and_outputs)\n", "",
        "tests/serving/test_serving.py",
    ),
    Mutant(
        "serving: padding overwrites results", "serving/step.py",
        "        if is_padding.any():", "        if False:", "tests/serving/test_serving.py",
    ),
    Mutant(
        "serving: pages of layers overlap in a block", "serving/layout.py",
        "blocks[:, : sum(sizes)].split(sizes, dim=1)", "[blocks[:, :size] for size in sizes]",
        "tests/serving/test_serving.py",
    ),
    Mutant(
        "serving: a ring of the wrong length", "serving/step.py",
        "            positions %= self.window", "            positions %= self.window + 1",
        "tests/serving/test_serving.py tests/serving/test_serving_layouts.py",
    ),
    # Captured steps.
    Mutant(
        "repeat: tokens of another layout are written", "cache/layer_storage.py",
        " or record.layout != describe_tokens(key, value):", ":",
        "tests/cache/test_repeated_steps.py",
    ),
    Mutant(
        "repeat: a new block table is ignored", "cache/layer_storage.py",
        "if positions.version != record.version:", "if False:",
        "tests/cache/test_repeated_steps.py",
    ),
    Mutant(
        "replay: a bound call with an unaligned tensor is replayed", "ops/triton/replay.py",
        "if result is not _MISALIGNED:", "if True:",
        "tests/ops/test_replay.py",
    ),
    Mutant(
        "repeat: another call of attention is accepted", "attention/fp8_paged.py",
        "or recorded.layout != _describe_layout(module, query, key, mask, arguments)", "",
        "tests/cache/test_repeated_steps.py",
    ),
    Mutant(
        "capture: different steps are captured", "attention/capture.py",
        "                if argument != old_argument:", "                if False:",
        "tests/attention/test_capture.py",
    ),
    Mutant(
        "capture: a changed cache meets an old graph", "cache/paged_layers.py",
        "        self.num_changes += 1\n", "",
        "tests/attention/test_capture.py",
    ),
    Mutant(
        "capture: dense keys of reserved positions are read", "attention/capture.py",
        "if reads_dense and self._is_reserved:", "if False:",
        "tests/attention/test_capture.py",
    ),
    Mutant(
        "capture: the first step is not compared", "attention/capture.py",
        "            outputs = self._compare(outputs, self._backup)\n", "            pass\n",
        "tests/attention/test_capture.py",
    ),
)  # fmt: skip


def have_tests_failed(tree: Path, *arguments: str) -> bool:
    """Run pytest, and return whether a test failed.

    Raises:
        SystemExit: pytest ended for a different reason.
        TimeoutExpired: The run took `PYTEST_SECONDS`.
    """
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CI": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree, env=environment, capture_output=True, text=True, timeout=PYTEST_SECONDS,
    )  # fmt: skip
    last_lines = "\n".join(process.stdout.splitlines()[-5:])
    # Processes of pytest-xdist that stop after a failed test count as interrupted.
    if process.returncode > 1 and not re.search(r"^\d+ failed", last_lines, re.MULTILINE):
        raise SystemExit(f"exit code {process.returncode} of pytest:\n{last_lines}")
    return process.returncode != 0


def find_failing_tier(tree: Path, mutant: Mutant) -> str:
    """Return the first tests that fail: "named tests", "fast tier", "full tier", or "SURVIVED"."""
    path = tree / "hf_fp8kv" / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        compile_kernels(tree, mutant)
        if have_tests_failed(tree, *mutant.tests.split()):
            return "named tests"
        if have_tests_failed(tree, *FAST_TIER):
            return "fast tier"
        return "full tier" if have_tests_failed(tree, *FULL_TIER) else "SURVIVED"
    except subprocess.TimeoutExpired:
        return "SURVIVED: timeout"
    finally:
        path.write_text(source)
        compile_kernels(tree, mutant)


def compile_kernels(tree: Path, mutant: Mutant) -> None:
    if mutant.file.endswith(".cpp"):
        subprocess.run([sys.executable, tree / "hf_fp8kv/ops/cpu/build.py"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="names of mutants, or parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name for part in options.only)]
    start = time.monotonic()
    trees = SimpleQueue[Path]()

    def test_mutant(mutant: Mutant) -> str:
        tree = trees.get()
        try:
            tier = find_failing_tier(tree, mutant)
        finally:
            trees.put(tree)
        print(f"{time.monotonic() - start:.0f} s: {mutant.name}: {tier}", flush=True)
        return tier

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for index in range(options.jobs):
            trees.put(shutil.copytree(ROOT, Path(folder, str(index)), ignore=NOT_COPIED))
        test_files = {file for mutant in mutants for file in mutant.tests.split()}
        if have_tests_failed(Path(folder, "0"), *FAST_TIER, *sorted(test_files)):
            raise SystemExit("tests fail without a mutation")
        with ThreadPoolExecutor(options.jobs) as pool:
            tiers = list(pool.map(test_mutant, mutants))
    num_late = sum(tier not in ("named tests", "fast tier") for tier in tiers)
    num_survivors = sum(tier.startswith("SURVIVED") for tier in tiers)
    print(f"{len(mutants) - num_late} of {len(mutants)} mutants detected by the fast tier, "
          f"{num_survivors} by no tier, {time.monotonic() - start:.0f} s")  # fmt: skip
    raise SystemExit(int(num_survivors > 0 or num_late > MAX_SURVIVORS))


if __name__ == "__main__":
    main()
