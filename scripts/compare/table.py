"""From records to a table: each system's best setting by the survey, medians of the rounds, pelton's ratio to each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .jobs import LINES, Record, settings_for
from .placement import FAR, NEAR

#: A peer's token may be this much less likely than the best by pelton's own log-probabilities, and a candidate's
#: log-probability may differ by as much: they round elsewhere. A wrong model is off by more than one for all tokens.
TOLERANCE = 0.25


def best_setting(records: Iterable[Record], system: str, line: str) -> str:
    """The setting with the highest median in the survey; the first there is, if nothing was tried."""
    names = settings_for(system, line)
    rates = {name: _surveyed(records, line, system, name) for name in names}
    tried = [name for name in names if rates[name]]
    return max(tried, key=lambda name: statistics.median(rates[name])) if tried else names[0]


def check(reference: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What agrees with pelton's reference (tokens, logprobs of a result); RuntimeError if it is another model."""
    short = 0.0
    for token, candidates in zip(result["tokens"], reference["logprobs"], strict=True):
        short = max(short, max(candidates.values()) - candidates.get(str(token), float("-inf")))
    if short > TOLERANCE:
        raise RuntimeError(f"a first token is {short:.3f} less likely than the best by pelton's log-probabilities")
    same = sum(token == other for token, other in zip(result["tokens"], reference["tokens"], strict=True))
    text = f"{same} of {len(result['tokens'])} first tokens equal, the others within {short:.3f}"
    if not result["logprobs"] or result["logprobs"][0] is None:
        return text
    apart = max(
        abs(value - theirs[key])
        for ours, theirs in zip(reference["logprobs"], result["logprobs"], strict=True)
        for key, value in ours.items()
        if key in theirs
    )
    if apart > TOLERANCE:
        raise RuntimeError(f"log-probabilities differ by {apart:.3f} from pelton's")
    return f"{text}; log-probabilities within {apart:.3f}"


def rounds(
    records: Iterable[Record], line: str, settings: Mapping[str, str], where: str | None = None
) -> list[dict[str, float]]:
    """Rates by system, a dict for each round of a line: a round ends where a system comes again.

    ``where``: only of runs in this placement; a system that had none in a round is missing from it.
    """
    found: list[dict[str, float]] = []
    seen: set[str] = set()
    for record in records:
        if (record.kind, record.line, record.setting) != ("round", line, settings.get(record.system)):
            continue
        if not found or record.system in seen:
            found.append({})
            seen = set()
        seen.add(record.system)
        rates = [record.rate] if where is None else record.placed.get(where, [])
        if rates:
            found[-1][record.system] = statistics.median(rates)
    return [each for each in found if each]


def table(records: Sequence[Record], systems: Sequence[str], where: str | None = None) -> str:
    """As Markdown, a row a line: medians in tokens/s with their range, and the median of pelton's ratios to a peer.

    Ratios are of one round each, since the machine's own rates drift from round to round. ``where``: of the runs in
    this placement alone.
    """
    peers = [system for system in systems if system != "pelton"]
    title = "tokens/s" if where is None else f"tokens/s, CPUs on {where}"
    head = [title, "rounds", "pelton", *(part for peer in peers for part in (peer, "pelton's ratio"))]
    rows = [head, ["---"] * len(head)]
    for line, about in LINES.items():
        settings = {system: best_setting(records, system, line) for system in systems}
        of_line = rounds(records, line, settings, where)
        if not of_line:
            continue
        row = [about.title, str(len(of_line)), _figure([r["pelton"] for r in of_line if "pelton" in r])]
        for peer in peers:
            ratios = [r["pelton"] / r[peer] for r in of_line if "pelton" in r and peer in r]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
            setting = f", {settings[peer]}" if len(settings_for(peer, line)) > 1 else ""
            row += [_figure([r[peer] for r in of_line if peer in r]) + setting, ratio]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(records: Sequence[Record], systems: Sequence[str]) -> str:
    """All rounds, and then those of each placement that there were runs in."""
    found = {where for record in records if record.kind == "round" for where in record.placed}
    return "\n\n".join(table(records, systems, where) for where in (None, NEAR, FAR) if where is None or where in found)


def survey_table(records: Sequence[Record], systems: Sequence[str]) -> str:
    """Every setting that was tried, as Markdown: medians in tokens/s, a column a line."""
    rows = [["survey, tokens/s", *(about.title for about in LINES.values())], ["---"] * (1 + len(LINES))]
    for system in systems:
        for name in dict.fromkeys(name for line in LINES for name in settings_for(system, line)):
            rates = [_surveyed(records, line, system, name) for line in LINES]
            if any(rates):
                rows.append([f"{system}, {name}", *(f"{statistics.median(r):.1f}" if r else "-" for r in rates)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figure(rates: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})" if rates else "-"


def _surveyed(records: Iterable[Record], line: str, system: str, setting: str) -> list[float]:
    wanted = ("survey", line, system, setting)
    return [r.rate for r in records if (r.kind, r.line, r.system, r.setting) == wanted]
