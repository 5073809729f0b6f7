"""Training on a toy set: it learns, resumes exactly, and what it exports is what was trained."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune_helpers import (
    END,
    RECIPE,
    SHAPE,
    finetune,
    flags,
    log_of,
    logits_of,
    write_questions,
)

from lazyattn_jax.finetune.batches import Source
from lazyattn_jax.finetune.checkpoints import Checkpoints, State
from lazyattn_jax.finetune.data import Questions
from lazyattn_jax.finetune.forward import Forward, stack
from lazyattn_jax.finetune.report import Report
from lazyattn_jax.finetune.train import Settings, Trainer
from lazyattn_jax.models.load import load_model
from lazyattn_jax.models.lora import with_adapter

STEPS = 24
OF_ALL = {"rank": 0, "learning_rate": 1e-2, "steps": STEPS, "eval_every": STEPS // 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """All weights trained on the toy set, with checkpoints half way and at the end."""
    folder = tmp_path_factory.mktemp("runs") / "all"
    held_out = {"held_out": data, "export": "safetensors orbax"}
    assert finetune(data, folder, **OF_ALL, **held_out) == 0
    return folder


def test_the_loss_falls_under_both_masks(run):
    """To what the colour alone costs: four of them, in answers of four to six tokens."""
    first, *_, last = log_of(run, "eval")
    assert first["step"] == 0
    assert last["step"] == STEPS
    for mask in ("full", "block"):
        assert first[mask] > 6  # the vocabulary has 512 tokens: ln 512 = 6.2
        assert last[mask] < 2
    assert [r["step"] for r in log_of(run, "train")] == list(range(1, STEPS + 1))
    rates = [r["rate"] for r in log_of(run, "train")]
    assert rates[0] == pytest.approx(5e-3)  # a warm-up of 3 % is one step, half way up
    assert rates[1] == pytest.approx(1e-2)
    assert rates[-1] < 1e-4
    assert (run / "loss.svg").read_text("utf-8").startswith("<?xml")


def test_training_resumes_exactly(run, data, tmp_path, monkeypatch):
    """Stopped, and from the last checkpoint on: the same losses and weights, bit for bit."""
    trained, folder = Report.trained, tmp_path / "stopped"

    def stop(self, step, score, rate):
        trained(self, step, score, rate)
        if step == STEPS * 3 // 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Report, "trained", stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(data, folder, **OF_ALL, held_out=data)
    monkeypatch.undo()
    assert [r["step"] for r in log_of(folder, "eval")] == [0, STEPS // 2]
    options = OF_ALL | {"held_out": data}
    assert finetune(data, folder, **options) == 2  # it is not started again by mistake
    assert finetune(data, folder, "--resume", **options | {"learning_rate": 1e-3}) == 2
    assert finetune(data, folder, "--resume", **options, export="safetensors") == 0
    assert (folder / "log.jsonl").read_bytes() == (run / "log.jsonl").read_bytes()
    again, before = (load_model(str(f / "safetensors")) for f in (folder, run))
    assert again.fingerprint == before.fingerprint


def test_what_is_exported_is_what_was_trained(run, data):
    """Both formats are the same model, which has the loss that training ended with."""
    plain, orbax = (load_model(str(run / kind)) for kind in ("safetensors", "orbax"))
    assert plain.fingerprint == orbax.fingerprint
    assert not (run / "adapter-best.safetensors").exists()
    recipe = dataclasses.replace(RECIPE, untitled=0.0)
    source = Source([Questions(data)], plain.tokenizer, recipe, SHAPE, end=END, seed=0)
    forward = Forward(plain.config, jnp.dtype("float32"), SHAPE.length)
    losses, weights = jax.jit(forward.losses), stack(plain.model)
    total, count = np.zeros(2), 0
    for batch in source.some(128):
        targets = int((batch.owner >= 0).sum())
        total += targets * np.asarray(losses(weights, jax.tree.map(lambda x: x[0], batch)).loss)
        count += targets
    last = log_of(run, "eval")[-1]
    assert total / count == pytest.approx([last["full"], last["block"]], abs=1e-5)


def test_an_adapter_is_exported_as_it_was_trained(run, data, tmp_path):
    """The base weights with the adapter beside them are the merged model, up to bfloat16."""
    options = {"model": run / "safetensors", "rank": 4, "learning_rate": 1e-2, "steps": 8}
    assert finetune(data, tmp_path / "run", **options, eval_every=8, export="safetensors") == 0
    base = load_model(str(run / "safetensors"))
    beside = with_adapter(base, tmp_path / "run" / "adapter-best.safetensors")
    merged = load_model(str(tmp_path / "run" / "safetensors"))
    forward = Forward(base.config, jnp.dtype("float32"), 64)
    tokens, positions = np.arange(2, 66)[None], np.arange(64)[None]
    mask = np.tril(np.ones((1, 64, 64), bool))

    def logits(model):
        return np.asarray(logits_of(forward, stack(model), tokens, positions, mask))

    stock, ours, theirs = (logits(x.model) for x in (base, beside, merged))
    moved = np.abs(theirs - stock).max()
    assert moved > 0.5
    assert np.abs(ours - theirs).max() < 0.02 * moved  # bfloat16 has 8 bits


def test_the_best_and_the_last_checkpoint_are_kept(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        states = [State({"w": jnp.full(3, float(i))}, ()) for i in range(5)]
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5), 1):
            checkpoints.save(step, states[step], loss)
        checkpoints.wait()
        assert (checkpoints.best, checkpoints.last) == (2, 4)
        kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
        assert kept == ["2", "4"]
        assert checkpoints.restore(2, states[0]).weights["w"].tolist() == [2.0] * 3
        with pytest.raises(ValueError, match="checkpoint 4 cannot be used here"):
            checkpoints.restore(4, State({"other": jnp.zeros(3)}, ()))


def test_parts_and_devices_do_not_change_a_step(data, tmp_path):
    """Two rows one after the other, and at once on two devices: the same losses and updates."""
    options = {"steps": 3, "eval_every": 3, "rank": 0, "learning_rate": 1e-2}
    assert finetune(data, tmp_path / "parts", **options, parts=2, rows=1) == 0
    subprocess.run(
        [sys.executable, "-m", "lazyattn_jax.finetune", *flags(data, tmp_path / "two", **options)],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        check=True,
    )
    parts, two = (log_of(tmp_path / name, "train") for name in ("parts", "two"))
    assert len(parts) == 3
    for ours, theirs in zip(parts, two, strict=True):
        del ours["kind"], theirs["kind"]
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_settings_that_cannot_work_are_refused(data, tmp_path, monkeypatch, capsys):
    def refused(**options):
        assert finetune(data, tmp_path / "run", **options) == 2
        return capsys.readouterr().err

    assert refused(steps=0) == "error: steps is 0, must be at least 1\n"
    assert "length is 4096, the model is made for at most 2048 positions" in refused(length=4096)
    assert "no sample fits in 16 tokens" in refused(length=16)
    assert "has 24 passages, fewer than the 30 documents" in refused(documents="2 30")
    assert "'{question}' in it" in refused(ask="what?")
    monkeypatch.setattr(jax, "devices", lambda: [None] * 3)
    assert "rows is 2, must be a multiple of the 3 devices" in refused()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_step_follows_the_weighed_losses(data, tmp_path, share):
    """The first step of Adam goes against the gradient's sign, however large the gradient is."""
    loaded, dtype = load_model("dummy:tiny"), jnp.dtype("float32")
    source = Source([Questions(data)], loaded.tokenizer, RECIPE, SHAPE, end=END, seed=0)
    settings = Settings(steps=1, rank=0, learning_rate=1e-3, block_share=share, distill=0.5)
    trainer = Trainer(loaded, settings, SHAPE, dtype)
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        with Report(tmp_path, 1, 0) as report:
            trainer.run(source, [], checkpoints, report)
        after = trainer.weights(checkpoints, 1)
    batch = jax.tree.map(lambda x: x[0], next(source.endless()))
    forward = Forward(loaded.config, dtype, SHAPE.length)

    @jax.jit
    def gradient(weights):
        def objective(weights):
            losses = forward.losses(weights, batch)
            full, block = losses.loss
            return (1 - share) * full + share * block + 0.5 * losses.divergence

        return jax.grad(objective)(weights)

    for name, grad in gradient(trainer.base).items():
        moved, clear = after[name] - trainer.base[name], np.abs(grad) > 1e-3 * np.abs(grad).max()
        assert clear.sum() > 10
        assert (np.sign(moved) == -np.sign(grad))[clear].all(), name
