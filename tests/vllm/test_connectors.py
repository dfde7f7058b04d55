"""Tests that vLLM never reads blocks of other weights, plans or scales, as in a restart."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from hf_fp8kv.errors import ConfigError

from .conftest import generate, generate_expected, make_file_tier_config, make_scales

vllm = pytest.importorskip("vllm")


@pytest.fixture
def restart(prompts, start_engine, monkeypatch):
    """Return a function that starts an engine, and returns tokens and numbers of cached tokens."""

    def start_and_generate(*arguments, **options):
        monkeypatch.setattr(
            "vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", None
        )
        llm = start_engine(*arguments, **options)
        answer = generate(llm, prompts)
        llm.llm_engine.engine_core.shutdown()
        return answer

    return start_and_generate


def test_a_restart_reads_only_files_of_the_same_scales(load_model, prompts, restart, tmp_path):
    # Only the contents of the file of scales change, not its path and name.
    model, folder = load_model("llama")
    answers = []
    for centered in (False, True):
        scales = make_scales("head", centered=centered)
        scales.save_pretrained(tmp_path / "scales", overwrite=True)
        expected = generate_expected(model, prompts, scales=scales)
        for is_restarted in (False, True):
            tokens, num_cached = restart(
                folder, "hf_fp8kv_static", tmp_path / "scales",
                kv_transfer_config=make_file_tier_config(tmp_path / "tier"),
            )  # fmt: skip
            assert tokens == expected
            assert any(num_cached) == is_restarted
        answers.append(expected)
    assert answers[0] != answers[1]


@pytest.fixture
def lmcache_options(tmp_path):
    """Start an LMCache server with storage in CPU memory, and return the connector's options."""
    if find_spec("lmcache") is None:  # an import here would break vLLM, as in conftest.py
        pytest.skip("LMCache is not installed")
    ports = []
    for _ in range(2):
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            ports.append(listener.getsockname()[1])
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(ports[0]),
        "--http-port", str(ports[1]), "--l1-size-gb", "0.1", "--chunk-size", "64",
        "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip
    log_path = tmp_path / "server.log"
    with open(log_path, "w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"LMCACHE_TRACK_USAGE": "false"}
        )
    try:
        while True:
            assert server.poll() is None, log_path.read_text()
            try:
                urllib.request.urlopen(f"http://localhost:{ports[1]}/healthcheck").close()
                break
            except OSError:  # it does not listen yet
                time.sleep(0.2)
        yield {"serde": "none", "lmcache.mp.port": ports[0]}
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_lmcache_returns_only_blocks_of_the_same_bytes(
    load_model, prompts, restart, lmcache_options, tmp_path, mode
):
    # LMCache's server outlives the engines, and the names of files do not change.
    model, folder = load_model("llama")
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": lmcache_options | {"lmcache.mp.mp_transfer_mode": mode},
    }
    # Only whole chunks of 64 tokens are stored, and the last token of a prompt is always computed.
    num_reused = [min(length // 64 * 64, length - 1) for length in map(len, prompts)]
    for centered in (None, False, True):
        if centered is None:
            cache_options = {"dtype": "fp8_e3m4"}
            arguments = ("hf_fp8kv_e3m4",)
        else:
            cache_options = {"scales": make_scales("head", centered=centered)}
            cache_options["scales"].save_pretrained(tmp_path / "scales", overwrite=True)
            arguments = ("hf_fp8kv_static", tmp_path / "scales")
        expected = generate_expected(model, prompts, **cache_options)
        for num_cached in ([0] * len(prompts), num_reused):
            assert (expected, num_cached) == restart(
                folder, *arguments, kv_transfer_config=connector
            )


def test_the_fingerprint_depends_only_on_bytes(load_model, tmp_path):
    from hf_fp8kv.vllm.connectors import identify_bytes, rename_model

    _, folder = load_model("llama")
    make_scales("head").save_pretrained(tmp_path / "scales")

    def configure(num_ranks=1, **options):
        model = SimpleNamespace(
            model=folder, revision=None, dtype=torch.float32, quantization=None, hf_overrides={},
            hf_config_path=None, hf_config=SimpleNamespace(),
        )  # fmt: skip
        vars(model).update((name, options[name]) for name in options.keys() & vars(model).keys())
        return SimpleNamespace(
            model_config=model,
            additional_config={
                "hf_fp8kv": {"scales": options.get("scales", str(tmp_path / "scales"))}
            },
            cache_config=SimpleNamespace(
                cache_dtype=options.get("cache_dtype", "hf_fp8kv_static"),
                kv_cache_dtype_skip_layers=options.get("skip_layers", []),
            ),
            load_config=SimpleNamespace(load_format=options.get("load_format", "auto")),
            parallel_config=SimpleNamespace(world_size=num_ranks, tensor_parallel_size=num_ranks),
            speculative_config=None,
            instance_id="a",
        )

    fingerprint = identify_bytes(configure())
    assert identify_bytes(configure(num_ranks=2)) == fingerprint
    pool = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))]
    )
    config = configure()
    model_names = [rename_model(configure(n), pool).model_config.model for n in (1, 1, 2)]
    assert len(set(model_names)) == 2
    assert all(name.startswith(f"{folder}-") for name in model_names)
    rename_model(config, pool)
    assert config.model_config.model == folder
    other_options = [
        {"dtype": torch.float16}, {"quantization": "fp8"}, {"hf_overrides": {"rope_theta": 1.0}},
        {"cache_dtype": "hf_fp8kv_e4m3_static"}, {"skip_layers": ["0"]}, {"load_format": "dummy"},
        {"scales": 1.0}, {"scales": 2.0}, {"hf_config_path": "other"},
    ]  # fmt: skip
    for options in other_options:
        assert identify_bytes(configure(**options)) != fingerprint, options
    copied_folder = shutil.copytree(folder, tmp_path / "copy")
    assert identify_bytes(configure(model=str(copied_folder))) == fingerprint
    with open(copied_folder / "model.safetensors", "r+b") as file:
        file.seek(100_000)
        file.write(bytes(5000))
    other_weights_fingerprint = identify_bytes(configure(model=str(copied_folder)))
    config_path = copied_folder / "config.json"
    config_path.write_text(config_path.read_text().replace("1024", "2048"))
    other_config_fingerprint = identify_bytes(configure(model=str(copied_folder)))
    assert len({fingerprint, other_weights_fingerprint, other_config_fingerprint}) == 3
    fingerprints = {fingerprint}
    for commit in ("0a", "0b"):
        hub_config = SimpleNamespace(_commit_hash=commit)
        fingerprints.add(identify_bytes(configure(model="org/model", hf_config=hub_config)))
    assert len(fingerprints) == 3
    with pytest.raises(ConfigError, match="expected weights in a folder or a repository"):
        identify_bytes(configure(model="s3://bucket/model"))
    stock_config = configure(cache_dtype="auto")
    assert rename_model(stock_config, pool) is stock_config


def test_connectors_that_could_read_other_bytes_are_refused(load_model, start_engine, tmp_path):
    from hf_fp8kv.vllm.connectors import check_connector

    _, folder = load_model("llama")
    transfer_config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with pytest.raises(ConfigError, match=r"expected one of .*got 'ExampleConnector'"):
        start_engine(folder, "hf_fp8kv_e3m4", kv_transfer_config=transfer_config)
    start_engine(folder, "auto", kv_transfer_config=transfer_config)  # not refused
    refused_connectors = [
        ("LMCacheConnectorV1", {}, "got 'LMCacheConnectorV1'"),
        ("LMCacheMPConnector", {}, "without serde, .*got serde None"),
        ("LMCacheMPConnector", {"serde": "fp8"}, "without serde, .*got serde 'fp8'"),
        ("MultiConnector", {"connectors": [transfer_config]}, "got 'ExampleConnector'"),
    ]
    for name, options, message in refused_connectors:
        with pytest.raises(ConfigError, match=message):
            check_connector(name, options)
    check_connector("LMCacheMPConnector", {"serde": "none"})
    check_connector("MultiConnector", {"connectors": [make_file_tier_config(tmp_path)]})
    check_connector(None, {})
