"""The frontier of cost and loss, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from memkv.errors import BadRequestError
from memkv.eval.study import Study


def draw(studies: Sequence[Study], path: Path) -> None:
    """One line for each study and kind of tasks: fresh share against added negative log-likelihood.

    Raises:
        BadRequestError: the file's name ends in no form that can be drawn.
    """
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):  # words stay words
        figure = _figure(studies)
        try:
            figure.savefig(path)
        except ValueError as error:
            raise BadRequestError(f"{path.name}: {error}", hint="end it in .png, .svg or .pdf") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise BadRequestError(
                f"{path}: {reason}", hint="give a file in a directory that exists"
            ) from None


def _figure(studies: Sequence[Study]) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for study in studies:
        for kind in dict.fromkeys(row.kind for row in study.rows):
            rows = sorted(
                (row for row in study.rows if row.kind == kind and row.questions), key=lambda row: row.fresh
            )
            axes.errorbar(
                [100 * row.fresh for row in rows],
                [row.dnll for row in rows],
                yerr=[
                    [max(0.0, row.dnll - row.dnll_low) for row in rows],  # never below 0, by rounding either
                    [max(0.0, row.dnll_high - row.dnll) for row in rows],
                ],
                fmt="o",
                capsize=3,
                label=f"{study.model}, {kind}, prefix of {study.prefix_tokens}",
            )
            for row in rows:
                at = (100 * row.fresh, row.dnll)
                axes.annotate(row.policy, at, fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("retrieved tokens computed afresh, %")
    axes.set_ylabel("added negative log-likelihood, nats a token")
    axes.axhline(0, linewidth=0.5)
    axes.legend(fontsize=8)
    return figure
