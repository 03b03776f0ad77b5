"""The results of all parts as one table."""

from __future__ import annotations

from typing import Any, Final

_SHOWN: Final = {"tests": "rows", "sanitizer": "rows", "bandwidth": "rows", "overlap": "hidden", "replay": "runs"}
"""What a part's result has where it came so far that there is something to show."""


def report(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, from the parts' documents by name."""
    revisions = ", ".join(dict.fromkeys(one["revision"] for one in results.values()))
    facts = next((one["device"] for one in results.values() if one["device"]), None)
    if facts is None:
        lines = ["# A GPU that could not be opened", "", f"`benchmarks/gpu_check.sh`, revision {revisions}."]
    else:
        title = "A dry run without a GPU: its times mean nothing" if facts["fake"] else facts["name"]
        lines = [f"# {title}", ""]
        lines.append(
            f"Driver for CUDA {facts['driver'] // 1000}.{facts['driver'] % 1000 // 10}, compute capability "
            f"{'.'.join(map(str, facts['capability']))}, {facts['multiprocessors']} multiprocessors. "
            f"`benchmarks/gpu_check.sh`, revision {revisions}."
        )
    lines += ["", "| part | | seconds |", "|---|---|---|"]
    for name, one in results.items():
        lines.append(f"| {name} | {_outcome(one)} | {one['seconds']:.0f} |")
    shown = {"tests": _tests, "sanitizer": _sanitizer, "bandwidth": _bandwidth, "overlap": _overlap, "replay": _replay}
    for name, make in shown.items():
        if name in results and _SHOWN[name] in results[name]:
            lines += ["", f"## {name.capitalize()}", "", *make(results[name])]
    return "\n".join(lines) + "\n"


def _outcome(part: dict[str, Any]) -> str:
    if part["ok"]:
        return "ok"
    return f"{'NOT RUN' if part.get('not_run') else 'FAILED'} {part.get('error', '')}".rstrip()


def _tests(part: dict[str, Any]) -> list[str]:
    lines = ["| tests marked gpu in | |", "|---|---|"]
    for row in part["rows"]:
        counts = ", ".join(f"{count} {word}" for word, count in row.get("counts", {}).items())
        said = f"not run: {row['left_out']}" if "left_out" in row else counts or row.get("error", "")
        lines.append(f"| {', '.join(row['paths'])} | {said} |")
    return lines


def _sanitizer(part: dict[str, Any]) -> list[str]:
    lines = ["| tool | |", "|---|---|"]
    return lines + [
        f"| {row['tool']} | {row.get('error') or row['summary'].strip('= ') or 'ok'} |" for row in part["rows"]
    ]


def _bandwidth(part: dict[str, Any]) -> list[str]:
    lines = ["GB/s between events, each beside one pinned `cudaMemcpyAsync` of as many bytes.", ""]
    lines += ["| page | in runs of | direction | way | GB/s | of the pinned copy | with its table | wrong pages | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in part["rows"]:
        where = "to device" if row["to_device"] else "to host"
        mark = "" if row["bar"] is None else f"{'ok' if row['ok'] else 'MISSED'}, bar {row['bar']}"
        lines.append(
            f"| {_size(row['page_bytes'])} | {_size(row['run_bytes'])} | {where} | {row['method']} "
            f"| {row['rate'] / 1e9:.2f} | {row['ratio']:.3f} | {row['with_table_rate'] / 1e9:.2f} "
            f"| {row['wrong_pages']} | {mark} |"
        )
    lines += ["", "The copy kernel by the number of its blocks, pages of 128 KiB, GB/s.", ""]
    lines += ["| blocks | to device | to host |", "|---|---|---|"]
    rates: dict[int, dict[bool, float]] = {}
    for row in part["sweep"]:
        rates.setdefault(row["blocks"], {})[row["to_device"]] = row["rate"] / 1e9
    return lines + [f"| {blocks} | {both[True]:.2f} | {both[False]:.2f} |" for blocks, both in rates.items()]


def _overlap(part: dict[str, Any]) -> list[str]:
    lines = ["A load of 32 layers behind compute of equal length.", ""]
    lines += ["| way | load, ms | compute, ms | both, ms | hidden |", "|---|---|---|---|---|"]
    for row in part["hidden"]:
        times = " | ".join(f"{row[name] * 1e3:.2f}" for name in ("load_seconds", "compute_seconds", "both_seconds"))
        lines.append(f"| {row['method']} | {times} | {row['hidden']:.3f} |")
    lines += ["", "The same compute with copies both ways beside it.", ""]
    lines += ["| way | compute | blocks of the kernel | slower by | copied beside it, GB/s |", "|---|---|---|---|---|"]
    for row in part["slowdown"]:
        blocks = f"{row['blocks']} on {row['multiprocessors']} multiprocessors" if row["blocks"] else ""
        rate = row["copied_bytes_per_second"] / 1e9
        lines.append(f"| {row['method']} | {row['kind']} | {blocks} | {row['slowdown'] * 100:.1f} % | {rate:.1f} |")
    return lines


def _replay(part: dict[str, Any]) -> list[str]:
    lines = ["| run | seconds | pages verified | pages wrong |", "|---|---|---|---|"]
    cells = [
        f"{run['name']} | {run['seconds']:.1f} | {run['pages_verified']:,} | {run['pages_wrong']}"
        for run in part["runs"]
    ]
    return lines + [f"| {row} |" for row in cells]


def _size(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
