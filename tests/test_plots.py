"""What plots draw, against numpy on plain zarr and on counts made by hand; none is looked at."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import zarr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ooc_embed
from ooc_embed import plots

DIM = 3


@pytest.fixture(autouse=True)
def nothing_is_shown_or_kept_by_pyplot() -> None:
    mpl.use("agg")
    before = plt.get_fignums()
    yield
    assert plt.get_fignums() == before
    plt.close("all")


@pytest.fixture
def trained(make_table: Callable[..., ooc_embed.DiskEmbedding]) -> ooc_embed.DiskEmbedding:
    """A table of 600 rows whose low rows were written most, and the last 100 never."""
    emb = make_table(600, DIM, optimizer=ooc_embed.SparseAdam(lr=0.1), chunk_rows=1024)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        ids = (500 * torch.rand(256, generator=generator) ** 3).long()
        emb(ids).square().sum().backward()
    emb.flush()
    return emb


def records(emb: ooc_embed.DiskEmbedding) -> np.ndarray:
    """``(600, W)``, by zarr alone; rows that were never written are zeros."""
    return zarr.open_group(emb.path, mode="r")["table"][:600]


def versions(emb: ooc_embed.DiskEmbedding) -> np.ndarray:
    return records(emb)[:, -1].astype(np.int64)


def outlines(ax: Axes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Heights and edges of the steps that are not filled."""
    steps = [patch for patch in ax.patches if not patch.get_fill()]
    return [(patch.get_data().values, patch.get_data().edges) for patch in steps]


def history(*counts: tuple[float, int, int]) -> list[ooc_embed.Stats]:
    """Stats of seconds, hits and misses."""
    names = [field.name for field in dataclasses.fields(ooc_embed.Stats)]
    nothing = dict.fromkeys(names, 0)
    return [
        ooc_embed.Stats(**{**nothing, "seconds": seconds, "hits": hits, "misses": misses})
        for seconds, hits, misses in counts
    ]


def test_norms_are_histograms_of_each_field(trained: ooc_embed.DiskEmbedding) -> None:
    ax = plots.norms(trained)
    stored = records(trained).astype(np.float64)
    is_written = stored[:, -1] > 0
    # Rows that were never written have their initial weight, which is not in the store.
    stored[~is_written, :DIM] = trained.weight[torch.from_numpy(~is_written)].numpy()
    for place, (heights, edges) in enumerate(outlines(ax)):
        of_field = np.linalg.norm(stored[:, place * DIM : (place + 1) * DIM], axis=1)
        of_field = of_field[of_field > 0]
        assert len(heights) == 50
        assert edges[[0, -1]] == pytest.approx([of_field.min(), of_field.max()])
        assert heights.sum() == len(of_field)
        # The outermost norms lie on the edges of their bins.
        counts = np.histogram(of_field, [0, *edges[1:-1], np.inf])[0]
        assert np.array_equal(heights, counts)
    assert place == 2
    assert ax.get_xscale() == "log"
    share = 100 * (~is_written).mean()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["weight", f"exp_avg, {share:.1f}% zero", f"exp_avg_sq, {share:.1f}% zero"]


def test_norm_of_the_version_is_the_count(trained: ooc_embed.DiskEmbedding) -> None:
    ax = plots.norms(trained, "version")
    ((heights, edges),) = outlines(ax)
    assert ax.get_xscale() == "linear"
    expected = np.histogram(versions(trained), 50)
    assert np.array_equal(heights, expected[0])
    assert np.allclose(edges, expected[1])


def test_norms_in_the_poincare_ball_are_below_one(
    make_table: Callable[..., ooc_embed.DiskEmbedding],
) -> None:
    inside = torch.nn.functional.normalize(torch.randn(50, 2), dim=1) * torch.rand(50, 1) * 0.9
    emb = make_table(50, 2, init=inside, optimizer=ooc_embed.RiemannianSGD(lr=0.1))
    ((heights, edges),) = outlines(plots.norms(emb, ["weight"]))
    assert heights.sum() == 50
    assert edges[-1] == pytest.approx(inside.norm(dim=1).max().item())


def test_norms_that_are_not_finite_are_told_and_not_drawn(
    make_table: Callable[..., ooc_embed.DiskEmbedding],
) -> None:
    emb = make_table(8, 2)
    emb.weight[3] = torch.tensor([float("nan"), 1.0])
    ax = plots.norms(emb, "weight")
    assert outlines(ax)[0][0].sum() == 7
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["weight, 12.5% not finite"]


def test_norms_of_a_table_that_nothing_was_written_to_are_drawn(
    make_table: Callable[..., ooc_embed.DiskEmbedding],
) -> None:
    ax = plots.norms(make_table(8, 2, init="zeros"))
    assert [heights.sum() for heights, _ in outlines(ax)] == [8, 8, 8]
    assert ax.get_xlim()[0] == 0


def test_updates_are_the_versions_by_rank(trained: ooc_embed.DiskEmbedding) -> None:
    ax = plots.updates(trained)
    (line,) = ax.lines
    ranked = np.sort(versions(trained))[::-1]
    ranks = line.get_xdata().astype(int)
    assert np.array_equal(line.get_ydata(), ranked[ranks - 1])
    # Each step of the curve is there, so between two points it is level.
    written = ranked[ranked > 0]
    steps = np.flatnonzero(np.diff(written)) + 1
    assert set(ranks) == {1, len(written), *steps, *(steps + 1)}
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    never = (versions(trained) == 0).sum()
    assert ax.get_xlabel() == f"rank of the row, without {never} that were never written"


def test_updates_of_a_table_that_nothing_was_written_to_are_an_empty_curve(
    make_table: Callable[..., ooc_embed.DiskEmbedding],
) -> None:
    ax = plots.updates(make_table())
    ax.figure.canvas.draw()
    assert len(ax.lines[0].get_xdata()) == 0
    assert ax.get_ylim() == (0.8, 12)
    assert "without 10 that were never written" in ax.get_xlabel()


def test_touched_is_the_share_of_written_rows_in_each_part(
    trained: ooc_embed.DiskEmbedding,
) -> None:
    ax = plots.touched(trained)
    ((heights, edges),) = outlines(ax)
    assert np.array_equal(edges, np.arange(201) * 3)
    written = versions(trained) > 0
    assert np.allclose(heights, 100 * written.reshape(200, 3).mean(axis=1))
    assert ax.get_title() == f"Written: {100 * written.mean():.1f}% of 600 rows"


def test_large_table_is_sampled_alike_each_time_and_says_so(
    trained: ooc_embed.DiskEmbedding,
) -> None:
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, second = (plots.touched(trained, max_rows=60) for _ in range(2))
    assert np.array_equal(np.random.get_state()[1], state[0])
    assert torch.equal(torch.get_rng_state(), state[1])
    (heights, edges), (again, _) = outlines(first)[0], outlines(second)[0]
    assert np.array_equal(heights, again)
    # One row stands for each ten.
    assert np.array_equal(edges, np.arange(61) * 10)
    parts = (versions(trained) > 0).reshape(60, 10)
    assert set(heights) == {0, 100}
    assert (heights[parts.all(axis=1)] == 100).all()
    assert (heights[~parts.any(axis=1)] == 0).all()
    for ax in (first, plots.updates(trained, max_rows=60), plots.norms(trained, max_rows=60)):
        assert ax.get_title().endswith("of a sample of 60 of 600 rows")
    assert [
        heights.sum() for heights, _ in outlines(plots.norms(trained, "weight", max_rows=60))
    ] == [60]


def test_ranks_of_a_sample_are_those_of_the_table(trained: ooc_embed.DiskEmbedding) -> None:
    (line,) = plots.updates(trained, max_rows=60).lines
    assert line.get_xdata()[0] == 10
    assert set(line.get_ydata()) <= set(versions(trained))


def test_tables_are_read_in_blocks(
    trained: ooc_embed.DiskEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = outlines(plots.norms(trained))
    monkeypatch.setattr(plots, "_BLOCK_NUMBERS", 7 * DIM)
    read = ooc_embed.RowView.__getitem__
    sizes = []
    monkeypatch.setattr(
        ooc_embed.RowView,
        "__getitem__",
        lambda view, key: sizes.append(len(key)) or read(view, key),
    )
    blocks = outlines(plots.norms(trained))
    assert max(sizes) == 7
    for (heights, _), (expected, _) in zip(blocks, whole, strict=True):
        assert np.array_equal(heights, expected)


def test_rates_are_differences_over_time() -> None:
    ax = plots.rates(history((1.0, 10, 30), (3.0, 40, 100), (3.5, 40, 100), (4.0, 140, 100)))
    ((rates, seconds),) = outlines(ax)
    assert np.array_equal(seconds, [1.0, 3.0, 3.5, 4.0])
    assert np.array_equal(rates, [50.0, 0.0, 200.0])
    ((shares, _),) = outlines(ax.figure.axes[-1])
    assert np.array_equal(shares, [30.0, np.nan, 100.0], equal_nan=True)


def test_rates_of_a_table_s_own_stats(trained: ooc_embed.DiskEmbedding) -> None:
    before = trained.stats()
    trained(torch.arange(50))
    after = trained.stats()
    ((rates, seconds),) = outlines(plots.rates([before, after]))
    assert np.array_equal(seconds, [before.seconds, after.seconds])
    assert rates[0] == pytest.approx(50 / (after.seconds - before.seconds))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([(1.0, 1, 1)], "two or more stats(), got 1"),
        ([], "two or more stats(), got 0"),
        ([(1.0, 1, 1), (1.0, 1, 1)], "history[1] (1.000 s) does not follow on history[0]"),
        ([(1.0, 1, 1), (2.0, 1, 1), (0.5, 0, 0)], "history[2] (0.500 s) does not follow"),
        ([(1.0, 5, 1), (2.0, 4, 9)], "history[1] (2.000 s) does not follow"),
        ([(1.0, 5, 9), (2.0, 6, 1)], "history[1] (2.000 s) does not follow"),
    ],
)
def test_rates_refuse_what_is_no_history(
    counts: list[tuple[float, int, int]], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        plots.rates(history(*counts))
    assert message in str(error.value)


def test_pca_puts_rows_where_a_singular_value_decomposition_does(
    trained: ooc_embed.DiskEmbedding,
) -> None:
    rows = [5, 3, 40, 41, 42, 7]
    ax = plots.pca(trained, rows)
    weights = records(trained)[rows, :DIM].astype(np.float64)
    weights -= weights.mean(axis=0)
    variances, directions = np.linalg.eigh(weights.T @ weights)
    expected = weights @ directions[:, [2, 1]]
    points = ax.collections[0].get_offsets()
    assert np.allclose(np.abs(points), np.abs(expected))
    assert np.allclose(points[:, 0] @ points[:, 1], 0)
    assert (points[np.abs(points).argmax(axis=0), [0, 1]] > 0).all()
    shares = variances[::-1] / variances.sum()
    assert ax.get_xlabel() == f"component 1, {100 * shares[0]:.1f}% of the variance"
    assert ax.get_ylabel() == f"component 2, {100 * shares[1]:.1f}% of the variance"


def test_names_stand_beside_their_points_and_not_on_each_other(
    trained: ooc_embed.DiskEmbedding,
) -> None:
    names = [f"row $^{row}$" for row in range(40)]  # not even with signs of formulas
    ax = plots.pca(trained, torch.arange(40), names)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) > 10
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    offsets = dict(zip(names, ax.collections[0].get_offsets(), strict=True))
    for text, box in zip(ax.texts, boxes, strict=True):
        x, y = ax.transData.transform(offsets[text.get_text()])
        away = max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0)
        assert np.hypot(*away) < 16  # pixels, at 100 an inch
    ax.figure.canvas.draw()
    missing = 40 - len(ax.texts)
    assert ax.get_title() == f"40 of 600 rows; names without room: {missing}"


def test_pca_refuses_what_has_no_two_components(
    trained: ooc_embed.DiskEmbedding, make_table: Callable[..., ooc_embed.DiskEmbedding]
) -> None:
    for table, rows, names, message in (
        (trained, [1], None, r"2 rows and 2 columns, got (1, 3)"),
        (trained, 1, None, r"2 rows and 2 columns, got (3,)"),
        (make_table(4, 1), [0, 1], None, r"2 rows and 2 columns, got (2, 1)"),
        (make_table(4, 2, init="zeros"), [0, 1, 2], None, "all 3 rows are equal"),
        (trained, [1, 2, 3], ["a", "b"], "3 rows have 2 names"),
    ):
        with pytest.raises(ValueError) as error:
            plots.pca(table, rows, names)
        assert message in str(error.value)
    trained.weight[1] = torch.full((DIM,), float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        plots.pca(trained, [0, 1, 2])


def test_field_that_is_not_there_and_a_sample_of_nothing_are_refused(
    trained: ooc_embed.DiskEmbedding,
) -> None:
    with pytest.raises(ValueError) as error:
        plots.norms(trained, ["weight", "moment"])
    assert "no field 'moment': its fields are weight, exp_avg, exp_avg_sq, version" in str(
        error.value
    )
    with pytest.raises(ValueError, match="no field is given"):
        plots.norms(trained, [])
    for plot in (plots.norms, plots.updates, plots.touched):
        with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
            plot(trained, max_rows=0)


def test_given_axes_are_drawn_on_and_returned(trained: ooc_embed.DiskEmbedding) -> None:
    axes = Figure().subplots(5)
    assert plots.norms(trained, ax=axes[0]) is axes[0]
    assert plots.updates(trained, axes[1]) is axes[1]
    assert plots.touched(trained, axes[2]) is axes[2]
    assert plots.rates(history((0, 0, 0), (1, 2, 3)), axes[3]) is axes[3]
    assert plots.pca(trained, [1, 2, 3], ["a", "b", "c"], axes[4]) is axes[4]
    assert all(ax.get_title() for ax in axes)


def test_axes_of_a_figure_of_pyplot_are_left_to_it(trained: ooc_embed.DiskEmbedding) -> None:
    figure, (left, right) = plt.subplots(1, 2)
    plots.touched(trained, left)
    assert plt.gcf() is figure
    assert plt.gca() is right
    plt.close(figure)


def test_reader_a_bag_and_an_opened_store_are_drawn_as_the_writer_is(
    trained: ooc_embed.DiskEmbedding, open_table: Callable[..., ooc_embed.DiskEmbedding]
) -> None:
    expected = outlines(plots.touched(trained))[0][0]
    reader = open_table(trained.path, "r")
    with ooc_embed.open_table(trained.path) as table:
        for other in (reader, table):
            assert np.array_equal(outlines(plots.touched(other))[0][0], expected)
            assert len(outlines(plots.norms(other))) == 3


def test_rows_of_a_bag_are_drawn(store_path) -> None:
    with ooc_embed.DiskEmbeddingBag(10, 2, path=store_path) as bag:
        bag(torch.tensor([[1, 3]])).sum().backward()
        assert np.array_equal(np.flatnonzero(outlines(plots.touched(bag))[0][0]), [1, 3])


def test_nothing_is_counted_or_brought_into_the_cache(trained: ooc_embed.DiskEmbedding) -> None:
    before = trained.stats()
    plots.norms(trained)
    plots.updates(trained)
    after = trained.stats()
    assert (after.hits, after.misses, after.evictions) == (
        before.hits,
        before.misses,
        before.evictions,
    )


def test_notebook_shows_axes_and_their_figure(trained: ooc_embed.DiskEmbedding) -> None:
    ax = plots.touched(trained)
    for shown in (ax, ax.figure):
        assert shown._repr_png_().startswith(b"\x89PNG\r\n\x1a\n")
    again = pickle.loads(pickle.dumps(ax))
    assert again.get_title() == ax.get_title()


def test_plots_without_matplotlib_name_the_extra(
    trained: ooc_embed.DiskEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plots.norms(trained),
        lambda: plots.updates(trained),
        lambda: plots.touched(trained),
        lambda: plots.rates(history((0, 0, 0), (1, 2, 3))),
        lambda: plots.pca(trained, [1, 2, 3]),
    ):
        with pytest.raises(ImportError, match=r"pip install 'ooc_embed\[plot\]'"):
            draw()


def test_package_does_not_import_matplotlib_and_plots_do_not_import_pyplot(tmp_path) -> None:
    code = (
        "import sys, ooc_embed\n"
        "assert 'matplotlib' not in sys.modules\n"
        "emb = ooc_embed.DiskEmbedding(10, 2, path='t.zarr')\n"
        "ooc_embed.plots.touched(emb).figure.savefig('t.png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
