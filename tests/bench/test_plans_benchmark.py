"""What the benchmark of plans plans."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from lazyattn_jax.bench import plans


def options(**given: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plans.add_command(parser.add_subparsers())
    sizes = {"requests": 6, "documents": 3, "document-tokens": 40, "repeats": 2} | given
    return parser.parse_args(["plans", *(f"--{name}={n}" for name, n in sizes.items())])


@pytest.mark.parametrize("zipf", [0.0, 1.0])
def test_requests_hold_cached_documents_one_after_the_other(zipf):
    traffic = plans.Traffic(options(requests=60), zipf)
    runs = traffic.shuffled()
    for run in runs:
        leading, *documents = run.context
        assert leading.is_leading
        assert [d.delta for d in documents] == [64, 104, 144]
        assert run.positions[0] == 184
        assert len({d.pages for d in documents}) == 3
        assert {len(d.pages) for d in documents} == {3}
    held = [d.pages for run in runs for d in run.context[1:]]
    assert (len(set(held)) == len(held)) == (zipf == 0)
    private = [page for run in runs for page in run.pages]
    assert len(set(private)) == len(private)
    assert not set(private) & {page for pages in held for page in pages}


def test_what_changes_from_step_to_step():
    traffic = plans.Traffic(options(), 1.0)
    before = list(traffic.shuffled())
    tokens = {id(run): len(run.tokens) for run in before}
    assert traffic.grown() == before
    assert all(len(run.tokens) == tokens[id(run)] + 1 for run in before)
    assert len(set(before) & set(traffic.changed())) == 5
    contexts = {run.context for run in traffic.shuffled()}
    new = traffic.renewed()
    assert {run.context for run in new} == contexts
    assert not set(new) & set(before)


def test_every_case_can_be_planned():
    names, seconds = zip(*plans.measure(options()), strict=True)
    assert len(set(names)) == 10
    assert np.isfinite(seconds).all()
