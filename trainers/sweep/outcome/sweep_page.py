"""The page of a sweep: the same pictures to point at, in one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go

from paceenv.trainers.sweep.outcome.importance import parameter_names, parameter_table
from paceenv.trainers.sweep.outcome.sweep_plots import ALL_COLOUR, BEST_COLOUR, FRONT_COLOUR, axes_of, label, shown
from paceenv.trainers.sweep.outcome.sweep_results import COLUMNS, Candidate, Results, cells
from paceenv.ui import html_page
from paceenv.ui.config_files import write_text


def write_page(results: Results, shares: Mapping[str, float], path: Path) -> None:
    """Write the page: winner, Pareto plot (a menu chooses the cluster), parallel coordinates, importance, failures.

    Args:
        results: of the sweep.
        shares: importance of each parameter; empty: left out.
        path: the HTML file.
    """
    config = results.config
    parts = [html_page.paragraph(config.description), html_page.heading("Winner"), _winners(results)]
    parts.append(html_page.heading("Results of the candidates"))
    figures = [_pareto(results), _parallel(results)] + ([_importance(results, shares)] if shares else [])
    for i, figure in enumerate(figures):
        figure.update_layout(template="plotly_white", height=480)
        parts.append(figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displaylogo": False}))
    if results.failed:
        rows = [(str(r["trial"]), r["error"]) for r in results.failed]
        parts += [html_page.heading("Trials that failed"), html_page.table(("trial", "error"), rows)]
    write_text(path, html_page.page(f"Sweep {config.name}", parts, scripts=True))


def _winners(results: Results) -> str:
    head = [
        "candidate",
        "trial",
        *(["cluster"] if results.clusters[0] else []),
        *(COLUMNS[o] for o in results.objectives),
    ]
    found = [best for cluster in results.clusters if (best := results.best(cluster)) is not None]
    return html_page.table(head, [cells(best, results.objectives) for best in found])


def _pareto(results: Results) -> go.Figure:
    x, y = axes_of(results)
    figure, clusters = go.Figure(), results.clusters

    def add(candidates: list[Candidate], name: str, cluster: str, **how: object) -> None:
        figure.add_scatter(
            x=shown(x, [c.values[x] for c in candidates]),
            y=shown(y, [c.values[y] for c in candidates]),
            text=[f"{html.escape(c.label)}<br>trial {c.trial}" for c in candidates],
            name=name,
            visible=cluster == clusters[0],
            **how,
        )

    for cluster in clusters:
        mine = [c for c in results.candidates if c.cluster == cluster]
        front = sorted(results.front(cluster), key=lambda c: c.values[x])
        add(mine, "candidates", cluster, mode="markers", marker={"color": ALL_COLOUR, "size": 6})
        add(front, "front", cluster, mode="lines+markers", marker={"color": FRONT_COLOUR, "size": 7})
        best = [one for one in [results.best(cluster)] if one is not None]
        add(best, "winner", cluster, mode="markers", marker={"color": BEST_COLOUR, "size": 14, "symbol": "star"})
    if len(clusters) > 1:
        buttons = [
            {"label": one, "method": "update", "args": [{"visible": [one == c for c in clusters for _ in range(3)]}]}
            for one in clusters
        ]
        figure.update_layout(updatemenus=[{"buttons": buttons, "x": 0.0, "y": 1.15, "xanchor": "left"}])
    figure.update_layout(xaxis_title=label(x), yaxis_title=label(y), margin={"t": 60})
    return figure


def _parallel(results: Results) -> go.Figure:
    names = parameter_names(results.candidates)
    table = parameter_table(results.candidates, names)
    dimensions = [{"label": name, "values": table[:, i].tolist()} for i, name in enumerate(names)]
    for objective in results.objectives:
        seen = shown(objective, [c.values[objective] for c in results.candidates])
        dimensions.append({"label": label(objective), "values": seen})
    first = results.objectives[0]
    colour = shown(first, [c.values[first] for c in results.candidates])
    figure = go.Figure(go.Parcoords(line={"color": colour, "colorscale": "Viridis"}, dimensions=dimensions))
    figure.update_layout(title="Parallel coordinates: draw along an axis to choose a range", margin={"t": 110})
    return figure


def _importance(results: Results, shares: Mapping[str, float]) -> go.Figure:
    names = list(shares)[::-1]
    figure = go.Figure(go.Bar(x=[shares[name] for name in names], y=names, orientation="h", marker_color=FRONT_COLOUR))
    title = f"Importance of parameters for {COLUMNS[results.objectives[0]]} (PED-ANOVA)"
    figure.update_layout(title=title, xaxis_title="share of the importance of all")
    return figure
