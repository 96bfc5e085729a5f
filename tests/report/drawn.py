"""The numbers in a chart, for tests."""

from typing import Any

from recast.lab.report.charts import Chart


def rows_where(chart: Chart, **wanted: object) -> list[dict[str, Any]]:
    """Return the points of the series that have a name, those with these values."""
    settings = chart.panel.keywords
    names = settings.get("xticks") or {}
    rows = [
        {"series": line.label or line.end, "value": point.y, **point._asdict(), "x": names.get(point.x, point.x)}
        for line in settings["series"]
        if line.label or line.end
        for point in line.points
    ]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def series_of(*charts: Chart) -> set[str]:
    """Return the names of the series of charts."""
    return {row["series"] for chart in charts for row in rows_where(chart)}
