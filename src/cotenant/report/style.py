"""Style sheet of reports, for paper, light and dark screens."""

SERIES = 6
"""Number of distinct colours of runs; further runs repeat them."""

CSS = """
:root { color-scheme: light dark; --paper: #fff; --sheet: #f6f7f9; --ink: #1b1f24; --soft: #5b6470; --rule: #d9dde3;
  --grid: #e8ebef; --s0: #d97706; --s1: #2563c9; --s2: #0f8a6d; --s3: #a8429b; --s4: #7a6a00; --s5: #4b5563;
  --answered: #2b7fc4; --late: #d98200; --dropped: #a3399a; --rejected: #d1442f; --failed: #111; --limit: #b42318;
  --fade: .58; --good: #13753f; --fair: #92610a; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --sheet: #1c2026; --ink: #e8eaed; --soft: #a2abb6;
  --rule: #343a42; --grid: #272c33; --s0: #f2a33a; --s1: #6aa5ff; --s2: #3fc9a4; --s3: #e08ad6; --s4: #d6c44a;
  --s5: #a9b1bc; --answered: #5aa9e6; --late: #f2b134; --dropped: #e08ad6; --rejected: #ff7d66; --failed: #fff;
  --limit: #ff8f80; --fade: .85;
  --good: #56c98a; --fair: #e5b454; --bad: #ff8f80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 44px 0 8px; padding-top: 16px; border-top: 1px solid var(--rule); }
h3 { font-size: 16px; margin: 24px 0 6px; }
p { margin: 6px 0 12px; max-width: 78ch; }
.soft, figcaption { color: var(--soft); } .soft { font-size: 14px; }
.lead { font-size: 19px; margin: 18px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 16px; margin: 20px 0; }
.card { background: var(--sheet); border-radius: 8px; border-left: 5px solid; padding: 14px 18px; }
.card b { display: block; font-size: 36px; line-height: 1.15; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: 14px; color: var(--soft); }
.card .run { font-size: 15px; font-weight: 600; color: var(--ink); }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 10px 10px; }
.wide { overflow-x: auto; } .wide > svg { min-width: 760px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 5px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
tr.total td { font-weight: 600; border-bottom: 0; } td.zero { color: var(--soft); opacity: .65; }
table.facts { min-width: 0; }
table.facts td { text-align: left; white-space: normal; padding: 3px 18px 3px 0; border: 0; }
table.facts td:first-child { color: var(--soft); white-space: nowrap; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
.warn { border-left: 4px solid var(--fair); padding: 4px 12px; background: var(--sheet); font-size: 14.5px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 14px; margin: 8px 0 12px; }
.key span { display: inline-flex; align-items: center; gap: 7px; } .key svg { width: 22px; height: 14px; }
pre { background: var(--sheet); border-radius: 6px; padding: 12px 14px; overflow-x: auto; font-size: 13.5px;
  line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .93em; }
svg { display: block; width: 100%; height: auto; font: 12.5px system-ui, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--soft); } svg .title { fill: var(--ink); font-size: 14.5px; font-weight: 600; }
svg .name, svg .value { fill: var(--ink); font-size: 13.5px; } svg .note { fill: var(--limit); font-size: 12.5px; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--grid); fill: none; } svg .axis { stroke: var(--soft); fill: none; }
svg .limit { stroke: var(--limit); stroke-width: 1.4; stroke-dasharray: 6 4; fill: none; }
svg .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg .offered { stroke: var(--soft); stroke-dasharray: 2 4; }
svg .mark { fill: none; stroke-width: 1.3; opacity: .8; } svg .triangle { opacity: var(--fade); }
svg .dot { stroke-width: 4.2; stroke-linecap: round; opacity: var(--fade); }
@media print { main { max-width: none; } section { break-inside: avoid-page; } }
"""


def style_sheet() -> str:
    """The style sheet, with the classes of runs and outcomes."""
    series = [
        f".c{i} {{ fill: var(--s{i % SERIES}); }} .s{i} {{ stroke: var(--s{i % SERIES}); }} "
        f".b{i} {{ border-color: var(--s{i % SERIES}); }}"
        for i in range(SERIES * 2)
    ]
    outcomes = [
        f"svg .{name} {{ stroke: var(--{name}); }}" for name in ("answered", "late", "dropped", "rejected", "failed")
    ]
    return "\n".join([CSS.strip(), *series, *outcomes, "svg .cancelled { stroke: var(--soft); }"])
