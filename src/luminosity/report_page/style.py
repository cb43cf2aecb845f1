"""The style sheet of the page, light and dark. Colour-blind readers can tell its colours apart (Okabe and Ito 2008)."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f6f7f9; --ink: #1c2430; --muted: #5d6877;
  --rule: #dde2e8; --reference: #0072b2; --current: #d55e00; --drifted: #c44500; --steady: #00795a; --bar: #9fb0c3;
  --tail: #d9a25c; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --panel: #1a2028; --ink: #e6eaf0; --muted: #98a4b3;
  --rule: #2c3540; --reference: #56b4e9; --current: #f0883e; --drifted: #ff8a4c; --steady: #3fc79a; --bar: #5c6f85;
  --tail: #c58a3c; } }
* { box-sizing: border-box; }

body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 52px 0 4px; }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 6px 0 14px; max-width: 72ch; }
.muted { color: var(--muted); fill: var(--muted); }
p.muted { font-size: 14px; }
.verdict { border-left: 6px solid; padding: 6px 0 6px 20px; margin-bottom: 28px; }
.verdict.drifted { border-color: var(--drifted); } .verdict.steady { border-color: var(--steady); }
.verdict.drifted h1 { color: var(--drifted); } .verdict.steady h1 { color: var(--steady); }
.verdict.unknown { border-color: var(--muted); }
td.drifted { color: var(--drifted); font-weight: 600; } td.steady { color: var(--steady); }
td.unknown { color: var(--muted); }
summary { cursor: pointer; margin-top: 52px; } summary h2 { display: inline; } a { color: inherit; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin: 20px 0 0; }
.fact { background: var(--panel); border-radius: 8px; padding: 12px 16px; }
.fact dt { color: var(--muted); font-size: 13px; } .fact dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; }
.fact dd small { display: block; font-size: 13px; font-weight: 400; color: var(--muted); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px; white-space: nowrap; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; } .number { text-align: right; padding-right: 24px; white-space: nowrap; }
.wide { overflow-x: auto; } .wide td:first-child { white-space: nowrap; } .wide td { max-width: 560px; }
.wide td:last-child:not(.number):not(:first-child) { min-width: 280px; }
table.settings th { width: 220px; font-size: 14px; font-weight: 400; vertical-align: top; }
svg { display: block; width: 100%; height: auto;
  font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg text.muted, svg text.title { fill: var(--muted); }
svg.small { display: inline-block; width: auto; vertical-align: -4px; }
svg text.muted { paint-order: stroke; stroke: var(--ground); stroke-width: 5px; stroke-linejoin: round; }
svg .strong { font-weight: 600; font-size: 14px; }
.axis { stroke: var(--muted); stroke-width: 1; } .grid { stroke: var(--rule); stroke-width: 1; }
.bar { fill: var(--bar); } .bar.tail { fill: var(--tail); }
.threshold { stroke: var(--muted); stroke-width: 1.2; stroke-dasharray: 5 4; fill: none; }
.line { fill: none; stroke-width: 2.5; stroke-linecap: round; stroke-linejoin: round; }
.drifted.line { stroke: var(--drifted); } .steady.line { stroke: var(--steady); }
svg text.drifted, .drifted.fill, .drifted.mark { fill: var(--drifted); } svg text.steady { fill: var(--steady); }
.steady.mark { fill: var(--ground); stroke: var(--steady); stroke-width: 2.2; }
.course { fill: none; stroke: var(--bar); stroke-width: 1.6; }
.dot { fill-opacity: 0.5; } .dot.key { fill-opacity: 1; } .reference { fill: var(--reference); }
.current { fill: var(--current); }
.ring { fill: none; stroke: var(--ink); stroke-width: 1.4; }
.outline { fill: none; stroke-width: 2; } .outline.reference { stroke: var(--reference); }
.outline.current { stroke: var(--current); stroke-dasharray: 6 3; }
span.key { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 8px; }
span.key.current { background: var(--current); } span.key.reference { background: var(--reference); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px 24px; }
.interval { stroke: var(--reference); stroke-width: 2.5; }
.cell { fill: var(--panel); } td small { color: var(--muted); }
@media print { main { max-width: none; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
"""
