"""What was exported beside training is loaded by those who have none of our code."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from selection import REPO
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from wrapped_tensors import Wrapper

from rankproof.run import run

pytest.importorskip("safetensors")
sys.path.insert(0, str(REPO / "recipes_source" / "checkpoint"))

from export import read_all  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from overlap_recipes.checkpoint.export import (  # noqa: E402
    DTYPES,
    Exports,
    ExportWriter,
    SafetensorsWriter,
    convert,
    for_transformers,
    weights,
)
from overlap_recipes.checkpoint.export_names import parts_of_model  # noqa: E402
from overlap_recipes.checkpoint.stores.directory import Folder  # noqa: E402

SCRIPT = REPO / "tests" / "data" / "export_llama.py"


def test_from_pretrained_gives_the_logits_of_the_trained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exporting = {"args": (str(tmp_path),), "through": (tmp_path,), "deadline_s": 120}
    report = run(SCRIPT, 2, launcher="warm", **exporting)
    assert report.ok, report.describe()
    expected = torch.load(tmp_path / "expected.pt")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(input_ids=expected["tokens"]).logits, expected["logits"])


def test_every_cut_of_a_tensor_comes_to_its_place() -> None:
    report = run(REPO / "tests" / "data" / "export_shards.py", 4, launcher="warm", deadline_s=60)
    assert report.ok, report.describe()


def test_experts_of_all_ranks_are_written_as_transformers_saves_them() -> None:
    pytest.importorskip("transformers", "5")
    report = run(REPO / "tests" / "data" / "export_experts.py", 2, launcher="warm", deadline_s=120)
    assert report.ok, report.describe()


class Reordered(nn.Module):
    """A model of which transformers would store the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.t(), "weight is stored in another order"),
        (lambda x: torch.cat([x, x]), "weight is made of other tensors"),
        (lambda x: x[:1], "transformers stores 3 of 6 elements of weight"),
    ],
    ids=["transposed", "joined", "cut"],
)
def test_what_is_no_block_of_a_tensor_is_refused(change, said: str, monkeypatch) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")

    def stored(model: nn.Module, state: dict) -> dict:
        return {name: change(tensor) for name, tensor in state.items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", stored)
    with pytest.raises(ValueError, match=said):
        parts_of_model(Reordered())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))


def test_tied_weights_are_written_once_in_whatever_wrapper(one_rank: None) -> None:
    recomputed = Tied()
    recomputed.head = checkpoint_wrapper(recomputed.head)
    in_fsdp1 = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for model in (
        recomputed,
        DistributedDataParallel(Tied()),
        DistributedDataParallel(torch.compile(Tied())),
        FullyShardedDataParallel(Tied(), **in_fsdp1),
    ):
        assert weights(model).keys() == weights(Tied()).keys(), type(model)


def mixture() -> nn.Module:
    transformers = pytest.importorskip("transformers", "5")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def test_a_model_of_transformers_is_found_in_whatever_wrapper(one_rank: None) -> None:
    expected = for_transformers(mixture())
    in_fsdp1 = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for model in (
        DistributedDataParallel(torch.compile(mixture())),
        torch.compile(DistributedDataParallel(mixture())),
        FullyShardedDataParallel(mixture(), **in_fsdp1),
    ):
        assert for_transformers(model) == expected, type(model)


def neox() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=2)
    return transformers.GPTNeoXForCausalLM(config)


def test_a_sharded_model_has_the_names_that_transformers_stores(one_rank: None) -> None:
    """Which it finds by the class of the model, and ``fully_shard`` gives it another."""
    model = neox()
    expected = for_transformers(model)
    names = [each.name for parts in expected["parts"].values() for each in parts]
    assert "embed_out.weight" in names
    fully_shard(model)
    around = type(model)
    assert for_transformers(model) == expected
    assert type(model) is around and isinstance(model, FSDPModule)


def test_an_adapter_is_refused_as_a_model_of_transformers() -> None:
    """Its weights have names of their own: ``from_pretrained`` would begin with random ones."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"])
    adapted = peft.get_peft_model(mixture(), settings)
    for model in (adapted, adapted.base_model.model):
        with pytest.raises(ValueError, match="merge_and_unload"):
            for_transformers(model)
    assert for_transformers(adapted.merge_and_unload()) == for_transformers(mixture())


def test_how_a_model_generates_is_exported(tmp_path: Path) -> None:
    model = mixture()
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(tmp_path / "reference")
    exported(weights(model), tmp_path / "hf", **for_transformers(model))
    found = {}
    for directory in ("reference", "hf"):
        found[directory] = json.loads((tmp_path / directory / "generation_config.json").read_text())
    assert found["hf"] == found["reference"]
    exported({"x": torch.ones(3)}, tmp_path / "hf")
    assert not (tmp_path / "hf" / "generation_config.json").exists(), "it is of another model"


class Quantized(Wrapper):
    """As ``torch.compile`` and checkpoints ask for its parts."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def test_a_weight_that_is_made_of_others_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="x is a Quantized.*export plain tensors"):
        exported({"x": Quantized(torch.ones(3))}, tmp_path / "hf")


def exported(state: dict, directory: Path, **options) -> dict[str, torch.Tensor]:
    with Exports(torch.device("cpu"), **options) as exports:
        exports.save(state, directory)
    return read_all(directory)


def test_every_dtype_and_layout_comes_back(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES}
    state |= {"turned": matrix.t(), "skipped": matrix[:, ::2], "expanded": matrix[:1].expand(5, 4)}
    state |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 3)}
    found = exported(state, tmp_path / "hf")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with pytest.raises(RuntimeError, match=r"no dtype for \['x'\]"):
        exported({"x": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "complex")


def test_what_lies_beside_an_older_export_stays(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    exported({"x": torch.zeros(3)}, hf, config={"layers": 1})
    (hf / "tokenizer.json").write_text("{}")
    (hf / "original").mkdir()
    (hf / "original" / "params.json").write_text("[]")
    exported({"x": torch.ones(3)}, hf)
    assert (hf / "tokenizer.json").read_text() == "{}"
    assert (hf / "original" / "params.json").read_text() == "[]"
    assert (hf / "config.json").read_text() == '{\n  "layers": 1\n}'
    assert exported({"x": torch.ones(3)}, hf, config={"layers": 2})["x"].sum() == 3
    assert (hf / "config.json").read_text() == '{\n  "layers": 2\n}'
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_config_of_an_older_export_goes_with_its_model(tmp_path: Path) -> None:
    """A loader would read the old settings with the new weights."""
    hf = tmp_path / "hf"
    exported({"x": torch.zeros(3)}, hf, config={"width": 3})
    exported({"x": torch.ones(4)}, hf)
    assert not (hf / "config.json").exists()


@pytest.mark.parametrize("struck", ["between the renames", "behind them"])
def test_a_job_that_died_in_a_commit_loses_nothing(tmp_path: Path, struck: str) -> None:
    hf = tmp_path / "hf"
    exported({"x": torch.zeros(3)}, hf)
    (hf / "tokenizer.json").write_text("{}")
    owner, step = {
        "between the renames": (Folder, "commit"),
        "behind them": (Path, "iterdir"),
    }[struck]
    exports = Exports("cpu")
    with mock.patch.object(owner, step, side_effect=KeyboardInterrupt), exports:
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            exports.save({"x": torch.ones(3)}, hf).result()
        exports.writing.failures.clear()
    assert hf.exists() == (struck == "behind them")
    assert exported({"x": torch.ones(3) * 2}, hf)["x"].sum() == 6
    assert (hf / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_directory_of_other_files_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with Exports("cpu") as exports, mock.patch.object(ExportWriter, "write") as write:
        saving = exports.save({"x": torch.ones(3)}, tmp_path / "hf")
        with pytest.raises(RuntimeError, match="has files and no export: export to another"):
            saving.result()
        exports.writing.failures.clear()
    assert not write.called
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_model_that_is_no_export_is_not_written_over(tmp_path: Path) -> None:
    """A base model of the Hub: nobody else may have it."""
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    with Exports("cpu") as exports:
        saving = exports.save({"x": torch.ones(3)}, tmp_path)
        with pytest.raises(RuntimeError, match="model.safetensors is no export: move it"):
            saving.result()
        exports.writing.failures.clear()
    assert not load_file(tmp_path / "model.safetensors")["x"].any()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_working_directory_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A new directory would take its place, and the job would stand in a deleted one."""
    (tmp_path / "hf" / "logs").mkdir(parents=True)
    for inside in (tmp_path / "hf", tmp_path / "hf" / "logs"):
        monkeypatch.chdir(inside)
        with pytest.raises(RuntimeError, match="hf is the working directory, or has it"):
            exported({"x": torch.zeros(3)}, tmp_path / "hf")
    assert Path.cwd() == tmp_path / "hf" / "logs"


def test_a_conversion_that_died_leaves_nothing_that_could_be_taken_for_weights(
    tmp_path: Path,
) -> None:
    state = {"app": {"model": {"w": torch.ones(3)}}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    interrupted = mock.patch.object(SafetensorsWriter, "write_part", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(BaseException, match="KeyboardInterrupt"):
        convert(tmp_path / "saved", tmp_path / "hf")
    assert not list((tmp_path / "hf").glob("*.safetensors"))
    convert(tmp_path / "saved", tmp_path / "hf")
    assert read_all(tmp_path / "hf")["w"].sum() == 3
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["model.safetensors", "model.safetensors.index.json"]


def test_a_conversion_writes_over_no_other_file(tmp_path: Path) -> None:
    state = {"app": {"model": {"w": torch.ones(3)}}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("mine")
    with pytest.raises(BaseException, match="config.json is there"):
        convert(tmp_path / "saved", hf, config={"width": 3})
    assert [path.name for path in hf.iterdir()] == ["config.json"]
    convert(tmp_path / "saved", hf)
    assert (hf / "config.json").read_text() == "mine"


def test_the_config_is_what_save_pretrained_writes_in_another_dtype(
    tmp_path: Path, one_rank
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=32))
    folders = tmp_path / "exported", tmp_path / "stock"
    with Exports("cpu", **for_transformers(model, torch.bfloat16)) as exports:
        exports.save(weights(model), folders[0])
    model.to(torch.bfloat16).save_pretrained(folders[1])
    ours, stock = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert ours.items() >= stock.items()
