import dataclasses
import json
import random
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import resolve
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import CheckpointError
from transformer_jax.training.checkpoint import Checkpoints, Metadata, best_step, kept_steps, like
from transformer_jax.training.digests import sha256_digests
from transformer_jax.training.runs import abstract_state
from transformer_jax.training.saving import Saver
from transformer_jax.training.step import init_state

NAN = float("nan")
CONFIG = resolve(
    Config(
        model=ModelConfig(context=8, d_model=8, num_heads=2, num_layers=2, compute_dtype="bfloat16"),
        optim=OptimConfig(optimizer="adamw", warmup_steps=3),
    ),
    vocab_size=3,
)
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture(scope="module")
def state():
    return jax.jit(partial(init_state, CONFIG))()


def metadata(step, val_loss=None):
    metrics = {"loss": 3.5} | ({} if val_loss is None else {"val_loss": val_loss})
    return Metadata(step, 8 * step, 1.5, metrics, CONFIG, Vocab("abc"), {"name": "x", "sha256": "0"})


def save(checkpoints, state, meta):
    """Keeps all that are there."""
    with Saver(checkpoints, TrainConfig(keep=100)) as saver:
        saver.save(state, meta)


def saved(folder, state, *steps):
    checkpoints = Checkpoints(folder)
    for step in steps:
        save(checkpoints, state.replace(step=state.step + step), metadata(step))
    return checkpoints


def newest(checkpoints):
    return checkpoints.newest(lambda m: like(abstract_state(m.config), SHARDING))


@pytest.mark.parametrize(
    ("losses", "best"),
    [([2.0, 1.0, NAN], 2), ([NAN, 2.0, 2.5], 2), ([2.0, NAN, 3.0], 1), ([None, float("inf"), 4.0], 3), ([2.0, 2.0], 1)],
)
def test_best(losses, best):
    by_step = dict(enumerate(losses, start=1))
    assert best_step(by_step) == best
    assert best in kept_steps(by_step, 1)
    assert len(by_step) in kept_steps(by_step, 1)


def test_nothing_is_best_where_nothing_was_measured():
    assert best_step({}) is None
    assert best_step({1: None, 2: NAN}) is None
    assert kept_steps({1: None, 2: NAN, 3: None}, 2) == {2, 3}


def test_round_trip(state, tmp_path):
    checkpoints = saved(tmp_path / "c", state, 5)
    meta, restored, skipped = newest(checkpoints)
    assert meta == metadata(5)
    assert skipped == []
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert isinstance(restored.opt_state[1].inner_state[0], optax.ScaleByAdamState)
    expected = state.replace(step=state.step + 5)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert [x.dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_parameters_alone(state, tmp_path):
    checkpoints = saved(tmp_path / "c", state, 5)
    part = checkpoints.restore(checkpoints.metadata(5), {"params": like(abstract_state(CONFIG).params, SHARDING)})
    assert set(part) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, part["params"], state.params)


def test_a_checkpoint_of_another_version_is_not_called_damaged(state, tmp_path):
    checkpoints = saved(tmp_path / "c", state, 5)
    params = like({"later": {"kernel": jax.numpy.zeros(3)}}, SHARDING)
    with pytest.raises(CheckpointError, match="has no params/later/kernel: another version of this program wrote it"):
        checkpoints.restore(checkpoints.metadata(5), {"params": params})


def test_relative_paths(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert saved(Path("here"), state, 1).steps() == [1]


def test_foreign_and_unfinished_folders_do_not_count(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    for name in ("9", "9.orbax-checkpoint-tmp", "notes", "007"):
        (tmp_path / name).mkdir()
    (tmp_path / "11").write_text("a file")
    assert checkpoints.steps() == [5]
    assert newest(checkpoints)[0].step == 5
    save(checkpoints, state, metadata(9))  # what stood in the way is set aside
    assert checkpoints.steps() == [5, 9]


def data_files(folder):
    return [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
def test_every_file_that_is_lost_or_cut_is_found(state, tmp_path):
    """Each file of the newest checkpoint in turn: then the one before is used, or the state is the same."""
    original = tmp_path / "original"
    saved(original, state, 5, 9)
    hits = 0
    for number, path in enumerate(data_files(original / "9")):
        for kind in ("delete", "empty", "cut"):
            copy = tmp_path / f"{number}-{kind}"
            shutil.copytree(original, copy)
            victim = copy / path.relative_to(original)
            content = victim.read_bytes()
            victim.unlink() if kind == "delete" else victim.write_bytes(content[: 0 if kind == "empty" else -1])
            meta, restored, skipped = newest(Checkpoints(copy))
            if meta.step == 5:
                hits += 1
            else:
                jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
                assert int(restored.step) == 9
            assert all("9" in line and len(line) < 600 and "\n" not in line for line in skipped)
            shutil.rmtree(copy)
    assert hits > 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
def test_no_usable_checkpoint(state, tmp_path):
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        newest(Checkpoints(tmp_path))
    checkpoints = saved(tmp_path, state, 5)
    (tmp_path / "5" / "metadata" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match="checkpoint 5 .* is damaged"):
        newest(checkpoints)
    with pytest.raises(CheckpointError, match="no checkpoint 6 .* there are 5"):
        checkpoints.metadata(6)


def test_other_format_is_refused_by_name(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    path = tmp_path / "5" / "metadata" / "metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99, and this version reads 1 and 2"):
        checkpoints.metadata(5)


def test_a_failing_save_is_an_error_and_harms_nothing(state, tmp_path):
    checkpoints = saved(tmp_path / "c", state, 5)
    # A dangling link where Orbax wants to make a folder fails for every user, root included.
    moved = tmp_path / "away"
    (tmp_path / "c").rename(moved)
    (tmp_path / "c").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoint 9 could not be written"):
        save(checkpoints, state, metadata(9))
    assert newest(Checkpoints(moved))[0].step == 5


def test_saving_a_step_twice_keeps_the_first(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    save(checkpoints, state, metadata(5, val_loss=1.0))
    assert checkpoints.metadata(5).val_loss is None


def test_prune_keeps_the_newest_and_the_best(state, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, loss in enumerate([2.0, 1.0, NAN, 3.0, 2.5]):
        save(checkpoints, state, metadata(step, loss))
    checkpoints.prune(2)
    assert checkpoints.steps() == [1, 3, 4]
    assert checkpoints.best() == 1


def test_what_a_killed_process_left_to_prune_is_pruned(state, tmp_path):
    """Also where nothing more is saved."""
    checkpoints = saved(tmp_path, state, 1, 2, 3)
    (tmp_path / "0.deleting").mkdir()
    with Saver(checkpoints, TrainConfig(keep=2)):
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.others() == {}


def test_discard_after_loses_nothing(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5, 9)
    assert checkpoints.discard_after(5) == [9]
    assert checkpoints.steps() == [5]
    assert (tmp_path / "9.aside-0" / "metadata").is_dir()


def test_odd_paths(state, tmp_path):
    for name in ("with blank", "é ü", "x" * 100 + "/" + "y" * 120):
        assert saved(tmp_path / name, state, 1).steps() == [1]
        assert newest(Checkpoints(tmp_path / name))[0].step == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
def test_every_flipped_bit_is_found(state, tmp_path):
    """A bit flipped anywhere: our error, or a state that is the same to the last bit."""
    saved(tmp_path / "original", state, 5)
    draw, found = random.Random(0), 0
    files = data_files(tmp_path / "original" / "5")
    for number in range(25):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", copy)
        path = copy / draw.choice(files).relative_to(tmp_path / "original")
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            meta, restored, _ = newest(Checkpoints(copy))
        except CheckpointError:
            found += 1
            continue
        jax.tree.map(np.testing.assert_array_equal, restored, state.replace(step=state.step + 5))
        assert (meta.step, meta.config, meta.vocab) == (5, CONFIG, Vocab("abc"))
    assert found  # about one in three; the rest are bytes that Orbax writes and does not read


def rewrite(folder, step, **fields):
    """Changes what a checkpoint says of itself, and signs it anew."""
    path = folder / str(step) / "metadata" / "metadata"
    old = Metadata.from_dict(json.loads(path.read_text()))
    path.write_text(json.dumps(dataclasses.replace(old, **fields).to_dict()))


def test_a_value_that_changed_is_named(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    rewrite(tmp_path, 5, digests={**checkpoints.metadata(5).digests, "params/head/kernel": "0"})
    meta, whole = checkpoints.metadata(5), abstract_state(CONFIG)
    for read in (lambda: checkpoints.restore(meta, like(whole, SHARDING)), lambda: checkpoints.verify(meta, whole)):
        with pytest.raises(CheckpointError, match="checkpoint 5 .* params/head/kernel is not what was saved"):
            read()


def test_metadata_that_changed_are_found(state, tmp_path):
    """Also where the file is still good JSON of a good config."""
    checkpoints = saved(tmp_path, state, 5)
    path = tmp_path / "5" / "metadata" / "metadata"
    text = path.read_text()
    assert '"examples": 40' in text
    path.write_text(text.replace('"examples": 40', '"examples": 48'))
    with pytest.raises(CheckpointError, match="checkpoint 5 .* is damaged: ValueError: the metadata are not what"):
        checkpoints.metadata(5)


def test_the_first_format_can_be_read(state, tmp_path):
    """As version 0.1.0 wrote it: a loss in place of metrics, SHA-256 of the arrays, none of the metadata."""
    checkpoints = saved(tmp_path, state, 5)
    path = tmp_path / "5" / "metadata" / "metadata"
    values = json.loads(path.read_text())
    for name in ("metrics", "sha256", "mesh"):
        del values[name]
    stored = state.replace(step=state.step + 5)
    path.write_text(json.dumps({**values, "format": 1, "val_loss": 2.5, "digests": sha256_digests(stored)}))
    meta, restored, _ = newest(checkpoints)
    assert (meta.step, meta.val_loss, meta.config) == (5, 2.5, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, restored, stored)
    checkpoints.verify(meta, abstract_state(CONFIG))
    path.write_text(json.dumps({**values, "format": 1, "val_loss": 2.5, "digests": sha256_digests(state)}))
    with pytest.raises(CheckpointError, match="step is not what was saved"):
        newest(checkpoints)
    with pytest.raises(CheckpointError, match="step is not what was saved"):
        checkpoints.verify(checkpoints.metadata(5), abstract_state(CONFIG))


def test_each_process_can_verify_its_share(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    names = list(checkpoints.metadata(5).digests)
    rewrite(tmp_path, 5, digests={**checkpoints.metadata(5).digests, names[4]: "0"})
    for me in range(3):
        share = slice(me, None, 3)
        if 4 in range(len(names))[share]:
            with pytest.raises(CheckpointError, match=f"{names[4]} is not what was saved"):
                checkpoints.verify(checkpoints.metadata(5), abstract_state(CONFIG), share)
        else:
            checkpoints.verify(checkpoints.metadata(5), abstract_state(CONFIG), share)
    checkpoints.verify(checkpoints.metadata(5), abstract_state(CONFIG), slice(len(names), None))


def test_sizes_are_compared_before_memory_is_taken(state, tmp_path):
    """The config of the metadata asks for a model that no memory could hold."""
    checkpoints = saved(tmp_path, state, 5)
    huge = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, d_model=2**20, num_heads=2))
    rewrite(tmp_path, 5, config=huge)
    with pytest.raises(CheckpointError, match=r"is float32 \[.*8.*\], and float32 \[.*1048576.*\] is expected"):
        newest(checkpoints)
    with pytest.raises(CheckpointError, match="is expected"):
        checkpoints.verify(checkpoints.metadata(5), abstract_state(huge))


def test_what_lies_beside_checkpoints(state, tmp_path):
    checkpoints = saved(tmp_path, state, 5)
    for name in ("9.orbax-checkpoint-tmp", "7.aside-0", "3.deleting", "notes", "007", "x.orbax-checkpoint-tmp", "11"):
        (tmp_path / name).mkdir()
    (tmp_path / "4.deleting").write_text("a file")
    kinds = {
        "11": "not a checkpoint",
        "007": "not a checkpoint",
        "3.deleting": "was being deleted",
        "4.deleting": "not a checkpoint",
        "7.aside-0": "set aside: in the way of a newer one",
        "9.orbax-checkpoint-tmp": "a save that was cut off",
        "notes": "not a checkpoint",
        "x.orbax-checkpoint-tmp": "not a checkpoint",
    }
    assert checkpoints.others() == kinds
    checkpoints.prune(1)
    gone = {"3.deleting", "9.orbax-checkpoint-tmp"}
    assert set(checkpoints.others()) == kinds.keys() - gone
    assert checkpoints.steps() == [5]


def test_what_is_kept():
    losses = {0: None, 10: 2.0, 20: 1.0, 30: 1.5, 40: NAN, 50: 3.0, 60: 2.5}
    assert kept_steps(losses, 1, 2) == {60, 20, 30}
    assert kept_steps(losses, 2, 1, 20) == {0, 20, 40, 50, 60}
    assert kept_steps(losses, 3, 0) == {40, 50, 60}
    assert kept_steps({}, 2, 2, 10) == set()
