"""named_weights yields exactly what save_pretrained writes, and refuses what it cannot export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoints import (
    FAMILIES,
    Change,
    build_checkpoint,
    build_model,
    perturb_checkpoint,
)
from vllm_sparse_refit.errors import CheckpointError, TensorMismatchError, UnsupportedModelError
from vllm_sparse_refit.trainer import model_export
from vllm_sparse_refit.trainer.weights import named_weights

Tensors = dict[str, torch.Tensor]


def exported(model: object) -> Tensors:
    pairs = list(named_weights(model))
    weights = dict(pairs)
    assert len(weights) == len(pairs), "a name was yielded twice"
    return weights


def saved(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert actual[name].is_contiguous(), name
        assert not actual[name].requires_grad, name
        assert bits_of(actual[name]) == bits_of(tensor), name


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# Models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_exports_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    model.save_pretrained(tmp_path)
    assert_same_bits(exported(model), saved(tmp_path))


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_loaded_model_exports_its_own_dtype(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path, family, dtype=dtype)
    model = type(build_model(family)).from_pretrained(tmp_path, dtype=dtype)
    assert_same_bits(exported(model), saved(tmp_path))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_only_the_experts_are_copied_and_one_layer_at_a_time(family: str) -> None:
    model = build_model(family, num_hidden_layers=4)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    copied_layers: list[str] = []
    for name, tensor in named_weights(model):
        if tensor.untyped_storage().data_ptr() not in storages:
            assert ".experts." in name
            copied_layers.append(name.partition(".layers.")[2].partition(".")[0])
    # Copies of a layer come together, so no more than one layer's are alive at a time.
    assert copied_layers == sorted(copied_layers)
    assert set(copied_layers) == {"0", "1", "2", "3"} - (
        {"0"} if family == "deepseek_v2" else set()  # its first layer has no experts
    )


def test_a_conversion_across_layers_is_done_in_one_go() -> None:
    """No architecture does this today; the planner must notice and not convert layer by layer."""

    def stack_layers(state: Tensors) -> Tensors:
        layers = [state[name] for name in sorted(state) if ".layers." in name]
        rest = {name: tensor for name, tensor in state.items() if ".layers." not in name}
        return {**rest, "stacked": torch.stack(layers)} if layers else rest

    state = {
        "model.layers.0.w": torch.ones(2, 3),
        "model.layers.1.w": torch.zeros(2, 3),
        "lm_head.w": torch.ones(4),
    }
    steps = model_export._plan(stack_layers, state)
    assert [step.sources for step in steps] == [tuple(state)]
    assert steps[0].target is None


def test_compiled_and_data_parallel_wrappers_are_looked_through() -> None:
    model = build_model("llama")
    wrapped = torch.nn.DataParallel(torch.compile(model))  # compiles nothing until it is called
    assert_same_bits(exported(wrapped), exported(model))


def test_exporting_leaves_the_model_alone() -> None:
    model = build_model("mixtral")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exported(model)
    assert_same_bits(dict(model.state_dict()), before)
    assert all(p.requires_grad for p in model.parameters())


def test_sharded_parameters_are_gathered(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model("mixtral")
    plain = {name: tensor.clone() for name, tensor in exported(model).items()}
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        weights = exported(model)
        assert not any(hasattr(tensor, "full_tensor") for tensor in weights.values())
        assert_same_bits(weights, plain)
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(TensorMismatchError, match=r"Linear is no transformers model.*pass an iter"):
        named_weights(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("_hf_peft_config_loaded", True, "merge"),
        ("merge_and_unload", lambda: None, "merge"),
        ("hf_quantizer", object(), "quantized"),
        ("_tp_size", 2, "tensor-parallel"),
    ],
)
def test_models_whose_parameters_are_not_the_checkpoint_are_refused(
    attribute: str, value: object, message: str
) -> None:
    model: PreTrainedModel = build_model("llama")
    setattr(model, attribute, value)
    with pytest.raises(UnsupportedModelError, match=message):
        named_weights(model)


def test_an_offloaded_model_is_refused_by_name() -> None:
    model = build_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*offloaded"):
        exported(model)


# Folders


@pytest.mark.parametrize("shard", ["50GB", "300KB"])
def test_a_folder_yields_its_tensors(shard: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "mixtral", max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "300KB")
    assert_same_bits(exported(tmp_path), saved(tmp_path))
    assert_same_bits(exported(str(tmp_path)), saved(tmp_path))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        named_weights(tmp_path / "nowhere")


def test_pickled_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(CheckpointError, match="pickles"):
        named_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["x"]}}',
    ],
)
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        named_weights(folder)


def test_an_index_that_disagrees_with_its_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"disagree about 1 tensors, b among"):
        exported(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        exported(tmp_path)


# Named tensors


def test_named_tensors_pass_through() -> None:
    weights = {"a": torch.arange(6).reshape(2, 3).t(), "b": torch.ones((), requires_grad=True)}
    assert_same_bits(exported(weights), {n: t.detach() for n, t in weights.items()})
    assert_same_bits(exported(iter(weights.items())), exported(weights))


def test_an_iterable_is_consumed_one_tensor_at_a_time() -> None:
    taken: list[str] = []

    def produce() -> object:
        for name in ("a", "b", "c"):
            taken.append(name)
            yield name, torch.ones(1)

    pairs = named_weights(produce())
    assert taken == []
    next(pairs)
    assert taken == ["a"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (3, "int is no model"),
        (torch.ones(2), "Tensor is no model"),
        (["a"], "item 0 of the weights is str"),
        ([("a", torch.ones(1)), ("b",)], "item 1 of the weights is tuple"),
        ([(7, torch.ones(1))], "named 7"),
        ([("", torch.ones(1))], "named ''"),
        ({"a": [1.0]}, "a is list; pass a tensor"),
        ({"a": torch.ones(1, device="meta")}, "a is on the meta device"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a has layout torch.sparse_coo"),
    ],
)
def test_what_is_no_pair_of_name_and_tensor_is_refused(weights: object, message: str) -> None:
    with pytest.raises(TensorMismatchError, match=message):
        exported(weights)


# The checkpoints that the tests are built on


@pytest.mark.parametrize("change", ["ulps", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_perturbing_changes_the_asked_share_and_nothing_else(
    dtype: torch.dtype, change: Change, tmp_path: Path
) -> None:
    source = build_checkpoint(tmp_path / "a", "mixtral", dtype=dtype, max_shard_size="900KB")
    for fraction in (0.02, 1.0):
        target = tmp_path / f"b{fraction}"
        count = perturb_checkpoint(source, target, fraction=fraction, seed=1, change=change)
        old, new = saved(source), saved(target)
        assert old.keys() == new.keys()
        shares = {n: bits_changed(old[n], new[n]) / old[n].numel() for n in old}
        assert min(shares.values()) > 0
        assert sum(bits_changed(old[n], new[n]) for n in old) == count
        assert count / sum(t.numel() for t in old.values()) == pytest.approx(fraction, rel=0.05)
        assert all(torch.isfinite(tensor).all() for tensor in new.values())
        assert {p.name for p in source.iterdir()} == {p.name for p in target.iterdir()}
        index = "model.safetensors.index.json"
        assert (source / index).read_text() == (target / index).read_text()


def bits_changed(old: torch.Tensor, new: torch.Tensor) -> int:
    width = {2: torch.int16, 4: torch.int32}[old.itemsize]
    assert (old.dtype, old.shape) == (new.dtype, new.shape)
    return int((old.view(width) != new.view(width)).sum())


def test_building_and_perturbing_are_repeatable(tmp_path: Path) -> None:
    for run in ("a", "b"):
        build_checkpoint(tmp_path / run, "qwen3", seed=5)
        perturb_checkpoint(tmp_path / run, tmp_path / f"{run}2", fraction=0.1, seed=6)
    assert_same_bits(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert_same_bits(saved(tmp_path / "a2"), saved(tmp_path / "b2"))
    build_checkpoint(tmp_path / "c", "qwen3", seed=6)
    name = "model.embed_tokens.weight"
    assert not torch.equal(saved(tmp_path / "c")[name], saved(tmp_path / "a")[name])
