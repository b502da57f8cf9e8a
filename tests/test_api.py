"""The Python interface: models built from flags and loaded, on one process and several, and modules of the user's own."""

import re
import subprocess
import sys

import pytest
import torch
from commands import REPOSITORY, read_metrics, run
from evaluation.trained_model import run_script
from training.tiny import MOCK, TINY

import moe_trainer
from arguments import ArgumentError
from moe_trainer.commands import prove as prove_layout
from moe_trainer.errors import UserError
from moe_trainer.verification import parity

FLAGS = [*TINY, *MOCK, "--qk-layernorm", "--moe-aux-loss-coeff", "0"]
BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "python_api.md").read_text(), re.DOTALL)
OWN = (
    BLOCKS[1]
    + """

def nothing(factory, args):
    return None


class Unsummed(ScaledRouter):
    def __init__(self, model, moe, ps, name, layer_number, **options):
        super().__init__(model, moe, ps, name, layer_number, **options)
        self.scale = make_parameter((1,), ParamInfo((f"{name}.scale",), init="ones"))


def unsummed(factory, args):
    return replace(factory, router=Unsummed)


number = 5
"""
)


def batch():
    tokens = torch.randint(120, (2, 33), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def save_losses(words):
    """Save the logits and losses of a model, on every rank."""
    source, target, *flags = words
    tokens, labels = batch()
    model = moe_trainer.load_model(source, flags)
    assert not model.training
    with torch.no_grad():
        found = {"logits": model(tokens), "losses": model(tokens, labels)}
    torch.save(found, f"{target}.{model.ps.world.rank}")
    moe_trainer.save_checkpoint(model, f"{target}.ck", iteration=3)
    moe_trainer.save_hf_folder(model, f"{target}.hf", "qwen3_moe")
    moe_trainer.save_hf_folder(model, f"{target}.hf_padded", keep_vocab_padding=True)
    return 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model's checkpoint, and its losses before saving."""
    folder = tmp_path_factory.mktemp("api")
    model = moe_trainer.build_model(FLAGS)
    tokens, labels = batch()
    losses = model(tokens, labels)
    losses.mean().backward()
    assert model.training and all(param.grad is not None for param in model.parameters())
    moe_trainer.save_checkpoint(model, folder / "ck")
    return folder, losses.detach()


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ""),
        (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_saved_models_compute_the_same_under_other_mappings(world_size, flags, saved):
    folder, losses = saved
    target = f"found{world_size}{flags[:4]}"
    assert run_script(save_losses, folder, world_size, ["ck", target, *flags.split()]) == [0] * world_size
    tokens, labels = batch()
    for rank in range(world_size):
        found = torch.load(folder / f"{target}.{rank}")
        torch.testing.assert_close(found["losses"], losses)
        cross_entropy = torch.nn.functional.cross_entropy(found["logits"].mT, labels, reduction="none")
        torch.testing.assert_close(cross_entropy, losses)
    for kind in ("ck", "hf", "hf_padded"):  # of a model with a null tokenizer all rows are kept
        with torch.no_grad():
            again = moe_trainer.load_model(folder / f"{target}.{kind}")(tokens, labels)
        torch.testing.assert_close(again, losses)
    assert not list(folder.glob(".*")), "the hidden checkpoint is removed"


def test_wrong_tokens_and_labels_are_named():
    model = moe_trainer.build_model(FLAGS)
    tokens, labels = batch()
    for words, message in (
        ((tokens[0],), r"tokens have the shape \[32\], and \[B, S\]"),
        ((tokens[:, :0],), r"tokens have the shape \[2, 0\]"),
        ((tokens.float(),), "tokens are torch.float32"),
        ((tokens.tolist(),), "tokens are list"),
        ((tokens + model.vocab_size,), f"and ids from 0 to {model.vocab_size - 1} are needed"),
        ((tokens, labels[:, 1:]), r"labels have the shape \[2, 31\], and that of tokens, \[2, 32\]"),
        ((tokens, labels.t()), r"labels have the shape \[32, 2\]"),
        ((tokens, labels - 200), "labels are from -200"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*words)


def test_errors_of_flags_folders_and_mappings(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(ArgumentError, match="--num-layers"):
        moe_trainer.build_model(["--num-layers", "-1"])
    with pytest.raises(ValueError, match="nowhere"):
        moe_trainer.load_model(tmp_path / "nowhere")
    model = moe_trainer.load_model(folder / "ck")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="exists already"):
        moe_trainer.save_hf_folder(model, tmp_path / "full")
    with pytest.raises(ValueError, match="llama"):
        moe_trainer.save_hf_folder(model, tmp_path / "hf", "llama")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_checkpoint_to_load_has_no_effect_on_initial_weights(saved, capfd):
    folder, losses = saved
    model = moe_trainer.build_model([*FLAGS, "--load", str(folder / "ck"), "--init-method-std", "0.3"])
    assert f"--load {folder / 'ck'} has no effect" in capfd.readouterr().err
    with torch.no_grad():
        assert not torch.allclose(model(*batch()), losses)


def refuse_pipeline(words):
    with pytest.raises(UserError, match="--pipeline-model-parallel-size 2: the Python interface"):
        moe_trainer.build_model([*FLAGS, "--pipeline-model-parallel-size", "2"])
    return 0


def test_pipeline_stages_are_rejected(tmp_path):
    assert run_script(refuse_pipeline, tmp_path, 2, []) == [0, 0]


def test_names_are_imported_on_first_use():
    code = "import sys, moe_trainer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    assert moe_trainer.build_model is moe_trainer.api.build_model
    assert {*moe_trainer.api.__all__} == {*moe_trainer._API}
    with pytest.raises(AttributeError, match="no attribute 'build'"):
        moe_trainer.build  # noqa: B018


def losses_of(folder):
    return [record["lm loss"] for record in read_metrics(folder) if "lm loss" in record]


def test_spec_replaces_the_router_in_training_and_after(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "layers.py").write_text(OWN)
    argv = [*TINY, *MOCK, "--train-iters", "2", "--save-interval", "1", "--make-vocab-size-divisible-by", "4"]
    plain = run([*argv, "--save", "plain"], tmp_path)
    own = run([*argv, "--save", "own_ck", "--spec", "own.layers:spec"], tmp_path)
    split = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    both = run([*argv, *split, "--save", "both", "--spec", "own.layers", "spec"], tmp_path, world_size=2)
    assert plain.returncode == own.returncode == both.returncode == 0, own.stderr + both.stderr
    first, changed, parallel = (losses_of(tmp_path / name / "metrics.jsonl") for name in ("plain", "own_ck", "both"))
    assert changed[0] == pytest.approx(first[0], rel=1e-6)
    assert parallel == pytest.approx(changed, rel=1e-5)
    monkeypatch.chdir(tmp_path)
    model = moe_trainer.load_model("own_ck", ["--spec", "own.layers:spec"])
    scale = model.network.decoder.layers[0].mlp.router.scale
    assert abs(scale.item() - 1.0) > 1e-3, "the scale is trained"
    with pytest.raises(ValueError, match="router.scale"):  # HF models have no such weight
        moe_trainer.save_hf_folder(model, "hf")
    with pytest.raises(ValueError, match="written with --spec own.layers:spec, which replaces modules: give it again"):
        moe_trainer.load_model("own_ck")
    resumed = run([*argv, "--load", "own_ck"], tmp_path)
    assert resumed.returncode == 2 and "written with --spec own.layers:spec" in resumed.stderr
    tuned = run([*argv, "--load", "own_ck", "--finetune"], tmp_path)
    assert tuned.returncode == 0 and "this model is built without it" in tuned.stderr + tuned.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["own"], "must be package.module:function"),
        (["own.layers:spec:more"], "must be package.module:function"),
        (["own/layers.py:spec"], "must be package.module:function"),
        (["nowhere:spec"], "module nowhere cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        (["own.missing:spec"], "No module named 'own.missing'"),
        (["own_broken:spec"], "module own_broken cannot be imported (NameError: name 'x' is not defined)"),
        (["own.layers:missing"], "has no function missing"),
        (["own.layers:number"], "has no function number"),
        (["own.layers", "nothing"], "returned NoneType"),
        (["os", "getpid"], "the function must take the LayerFactory and the Arguments (TypeError: "),
    ],
)
def test_wrong_spec_is_rejected(words, message, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "layers.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("x")
    done = run([*TINY, *MOCK, "--train-iters", "1", "--spec", *words], tmp_path)
    assert done.returncode == 2 and "--spec" in done.stderr and message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("function", "code"), [("spec", 0), ("unsummed", 1)])
def test_proofs_cover_modules_of_the_user(function, code, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_router.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parity, "STEPS", 1)
    monkeypatch.setattr(parity, "EXTRA_PERTURBATIONS", parity.EXTRA_PERTURBATIONS[:1])
    mapping = "--world-size 2 --train-iters 9 --tensor-model-parallel-size 2 --sequence-parallel".split()
    assert prove_layout.main([*mapping, *TINY, *MOCK, "--spec", f"own_router:{function}"]) == code
    assert ("router.scale: differs" in capsys.readouterr().out) == bool(code)


def test_code_of_the_manual_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[0], "python_api.md", "exec"), {})
    assert (tmp_path / "hf_folder" / "config.json").is_file() and (tmp_path / "checkpoint").is_dir()
