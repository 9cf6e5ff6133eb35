"""The page's style sheet: system fonts, one palette for light and one for dark, rows that become cards on a phone."""

_LIGHT = """
  --page: #f6f6f3; --card: #ffffff; --ink: #1a1d21; --muted: #626a73; --rule: #e4e4df; --grid: #e6e6e1;
      --soft: #f0f0ec;
  --merged: #1a1d21; --good: #1c7a45; --good-soft: #e2f2e8; --bad: #b3261e; --bad-soft: #fbe6e4;
      --warn: #8a5a00; --warn-soft: #fbf0d9;
  --link: #1f5fa8; --link-soft: #e5eef8; --idle: #cfd2d4; --busy: #7b838c; --fault: #b3261e;
  --l0: #1f6fb2; --l1: #c8641b; --l2: #2a8a72; --l3: #8a4fb0; --l4: #a8862a; --l5: #b23a6b;
"""
_DARK = """
  --page: #0f1215; --card: #171b20; --ink: #e7eaed; --muted: #98a2ac; --rule: #2a3037; --grid: #2b3138;
      --soft: #1f242a;
  --merged: #e7eaed; --good: #5cc98a; --good-soft: #16301f; --bad: #ff8a80; --bad-soft: #3a1a18;
      --warn: #e8b45a; --warn-soft: #33270f;
  --link: #7db7f0; --link-soft: #17283a; --idle: #3d454d; --busy: #8b949e; --fault: #e5484d;
  --l0: #5aa9e6; --l1: #f0914a; --l2: #52c2a4; --l3: #bd8ce0; --l4: #d6b657; --l5: #e8799f;
"""

STYLE = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 80px; }
code { font: 0.88em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
small { color: var(--muted); font-size: 0.86em; }
h1 { margin: 6px 0 4px; font-size: clamp(28px, 5vw, 40px); line-height: 1.15; letter-spacing: -0.02em;
    font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 20px; letter-spacing: -0.01em; font-weight: 650; }
h3 { margin: 28px 0 2px; font-size: 15px; font-weight: 650; }
.lead, .note, .beside, .empty { color: var(--muted); }
.lead { margin: 0 0 18px; max-width: 75ch; overflow-wrap: anywhere; }
.empty { margin: 8px 0; }

.overline { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; margin: 0; color: var(--muted);
    font-size: 14px; }
.fate { padding: 2px 12px; border-radius: 99px; font-weight: 600; }
.fate.good, .pill.good { color: var(--good); background: var(--good-soft); }
.fate.bad, .pill.bad, .pill.error { color: var(--bad); background: var(--bad-soft); }
.fate.warn, .pill.warn, .pill.warning { color: var(--warn); background: var(--warn-soft); }
.fate.open, .pill.file, .pill.flag { color: var(--link); background: var(--link-soft); }
.summary { margin: 0 0 14px; font-size: 17px; color: var(--muted); }
.reason { margin: 0 0 14px; padding: 10px 14px; border-radius: 8px; background: var(--soft);
    overflow-wrap: anywhere; white-space: pre-line; }
.reason.bad { color: var(--bad); background: var(--bad-soft); }
.reason.warn { color: var(--warn); background: var(--warn-soft); }
.reason.open { color: var(--link); background: var(--link-soft); }
.learners { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 0 0 26px; padding: 0; list-style: none;
    font-size: 14px; }
.learners li { overflow-wrap: anywhere; }
.learners li > span { color: var(--muted); }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 12px; }
.tile { display: flex; flex-direction: column; padding: 14px 16px; background: var(--card);
    border: 1px solid var(--rule); border-radius: 10px; }
.tile .name { font-size: 13px; color: var(--muted); }
.tile strong { font-size: 26px; line-height: 1.3; font-weight: 650; letter-spacing: -0.02em;
    font-variant-numeric: tabular-nums; }
.tile .beside { font-size: 12.5px; line-height: 1.4; overflow-wrap: anywhere; }
strong.good, span.good { color: var(--good); } strong.bad, span.bad { color: var(--bad); }

nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 22px 0 0; font-size: 14px; }
nav a { color: var(--link); text-decoration: none; padding: 3px 0; } nav a:hover { text-decoration: underline; }
section { margin-top: 20px; padding: 22px 24px 24px; background: var(--card); border: 1px solid var(--rule);
    border-radius: 12px; scroll-margin-top: 12px; }

.swatch { display: inline-block; width: 18px; height: 0; margin-right: 7px; vertical-align: middle;
    border-top: 3px solid currentColor; }
.swatch.dashed { border-top-style: dashed; }
.swatch.bar { width: 11px; height: 11px; border: 0; border-radius: 2px; background: currentColor;
    vertical-align: -1px; }
.swatch.points { width: 8px; height: 8px; border: 0; border-radius: 50%; background: currentColor; }
.l0 { color: var(--l0); } .l1 { color: var(--l1); } .l2 { color: var(--l2); } .l3 { color: var(--l3); }
.l4 { color: var(--l4); } .l5 { color: var(--l5); }
.swatch.merged { color: var(--merged); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 6px; font-size: 13px; color: var(--muted); }

.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 26px 30px; margin-top: 20px; }
.charts:empty { display: none; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 12px; align-items: baseline; font-size: 14px; }
figcaption b { font-weight: 600; } .note { font-size: 13px; }
.chart { display: flex; flex-direction: column; }
.chart svg { display: block; width: 100%; height: auto; margin-top: auto; color: var(--muted); }
.chart svg text { font-family: inherit; }

.scroll { overflow-x: auto; }
.strip { border-collapse: collapse; font-size: 13px; }
.strip caption { text-align: left; font-weight: 600; font-size: 14px; padding-bottom: 4px; }
.strip th { font-weight: 400; color: var(--muted); padding: 2px 4px; text-align: center; }
.strip tbody th, .strip thead th:first-child { text-align: left; padding: 0 16px 0 0; }
.strip tbody th span { display: block; max-width: 190px; line-height: 1.25; }
.strip td { padding: 2px; text-align: center; color: var(--muted); }
.strip .real { padding-left: 16px; }
img { display: block; width: 100%; image-rendering: pixelated; border-radius: 3px; background: var(--soft);
    color: transparent; overflow: hidden; }
.strip img { width: 40px; aspect-ratio: 1; }
.gallery { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 28px 36px; align-items: start; }
.viewer { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.viewer > input { position: absolute; opacity: 0; pointer-events: none; }
.viewer > label, .viewer > button { padding: 3px 11px; border: 1px solid var(--rule); border-radius: 99px;
    background: none; color: var(--muted);
  font: inherit; font-size: 13px; cursor: pointer; }
.viewer > button { color: var(--link); }
.viewer > input:checked + label { background: var(--ink); border-color: var(--ink); color: var(--card); }
.viewer > input:focus-visible + label { outline: 2px solid var(--link); outline-offset: 2px; }
.viewer > b { font-size: 14px; font-weight: 600; margin-right: 4px; }
.frames { flex-basis: 100%; margin-top: 8px; }
.frames > div { display: none; grid-template-columns: minmax(0, 1fr); gap: 14px 30px; }
.grid { display: grid; grid-template-columns: repeat(10, 1fr); gap: 3px; margin-top: 6px; }

.lanes { margin-top: 6px; }
.lane { display: grid; grid-template-columns: 96px minmax(0, 1fr); align-items: center; margin-bottom: 8px; }
.lane-name { font-size: 13px; font-weight: 600; overflow: hidden; text-overflow: ellipsis; padding-right: 10px;
    white-space: nowrap; }
.lane-bar { position: relative; }
.lane-bar svg { display: block; width: 100%; height: 30px; background: var(--soft); border-radius: 4px; }
.lane.syncer { color: var(--muted); } .lane.syncer svg { height: 16px; }
.heat { margin-top: 14px; } .heat .lane { margin-bottom: 4px; } .heat .lane-bar svg { height: 18px; }
.heat rect { fill: currentColor; }
.heat .lane-name { font-weight: 400; } .heat .lane { grid-template-columns: 118px minmax(0, 1fr); }
rect.training, .key.training { fill: currentColor; background: currentColor; }
rect.starting, .key.starting { fill: var(--idle); background: var(--idle); }
rect.waiting { fill: color-mix(in srgb, currentColor 34%, var(--card)); }
.key.waiting { background: linear-gradient(90deg, color-mix(in srgb, var(--l0) 34%, var(--card)) 50%,
  color-mix(in srgb, var(--l1) 34%, var(--card)) 50%);
    }
rect.ahead, .key.ahead { fill: var(--warn); background: var(--warn); }
rect.flying { fill: var(--ink); opacity: 0.55; }
.key.flying { height: 4px; background: var(--ink); opacity: 0.55; vertical-align: 3px; }
rect.applying, .key.applying { fill: var(--ink); background: var(--ink); }
rect.restarting, .key.restarting { fill: var(--fault); background: var(--fault); }
rect.collecting, .key.collecting { fill: var(--idle); background: var(--idle); }
rect.merging, .key.merging { fill: var(--busy); background: var(--busy); }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px;
    vertical-align: -1px; }
.key.training { background: linear-gradient(90deg, var(--l0) 50%, var(--l1) 50%); }
i.mark { position: absolute; top: -5px; margin-left: -5px; border: 5px solid transparent;
    border-top: 8px solid var(--fault); border-bottom: 0; }
.key.mark { position: static; width: 0; height: 0; margin-left: 0; border-radius: 0; vertical-align: 1px;
    background: none; }
.axis { position: relative; height: 18px; font-size: 12px; color: var(--muted); font-variant-numeric: tabular-nums; }
.axis span { position: absolute; } .axis span + span { transform: translateX(-50%); }

.table { overflow-x: auto; margin-top: 8px; }
table:not(.strip) { width: 100%; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
table:not(.strip) th { padding: 6px 18px 6px 0; text-align: left; font-weight: 500; color: var(--muted);
    border-bottom: 1px solid var(--rule); white-space: nowrap; }
table:not(.strip) td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
    overflow-wrap: anywhere; }
table:not(.strip) :is(th, td):last-child { padding-right: 0; }
table:not(.strip) tr:last-child td { border-bottom: 0; }
table:not(.strip) .num { text-align: right; } table.checks .num { white-space: nowrap; }
.pill { display: inline-block; padding: 0 8px; border-radius: 99px; background: var(--soft);
    color: var(--muted); font-size: 12px; line-height: 1.6; font-weight: 500; }
summary { cursor: pointer; font-size: 14px; color: var(--link); } details { margin-top: 12px; }
#notes details { margin: 0; }
.notes { margin: 10px 0 0; padding: 0; list-style: none; font-size: 14px; }
.notes li { padding: 3px 0; overflow-wrap: anywhere; }
#filter { width: 100%; max-width: 420px; margin-bottom: 6px; padding: 7px 12px; font: inherit; font-size: 14px;
    color: inherit;
  background: var(--soft); border: 1px solid var(--rule); border-radius: 8px; }
[hidden] { display: none !important; }
.versions { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 4px 30px;
    margin: 8px 0 0; font-size: 14px; }
.versions div { display: flex; justify-content: space-between; gap: 12px; border-bottom: 1px solid var(--rule);
    padding: 3px 0; }
.versions dt { color: var(--muted); }
.versions dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }

@media (max-width: 980px) { .gallery { grid-template-columns: minmax(0, 1fr);
} .frames > div { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 720px) {
  main { padding: 22px 12px 48px; }
  section { padding: 16px 14px 18px; border-radius: 10px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; } .tile { padding: 11px 12px; } .tile strong { font-size: 22px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .chart svg { width: calc(100% + 12px); margin-left: -6px; }
  .frames > div { grid-template-columns: minmax(0, 1fr); }
  .lane { grid-template-columns: minmax(0, 1fr); } .lane:last-child .lane-name { display: none; }
  .strip, .strip :is(caption, thead, tbody) { display: block; }
  .strip tr { display: flex; flex-wrap: wrap; gap: 3px; }
  .strip thead th:first-child { display: none; }
  .strip tbody th { flex-basis: 100%; padding: 6px 0 1px; font-size: 12px; } .strip tbody th span { max-width: none; }
  .strip td, .strip thead th { flex: 1 1 0; max-width: 46px; padding: 0; } .strip img { width: 100%; }
  .strip .real { padding-left: 8px; max-width: 54px; }
  table:not(.strip, .narrow), table:not(.strip, .narrow) :is(tbody, tr, td) { display: block; }
  table:not(.strip, .narrow) thead { display: none; }
  table:not(.strip, .narrow) tr { padding: 8px 0; border-bottom: 1px solid var(--rule); }
  table:not(.strip, .narrow) tr:last-child { border-bottom: 0; }
  table:not(.strip, .narrow) td { display: flex; justify-content: space-between; gap: 16px; padding: 2px 0;
      border: 0; text-align: right; }
  table:not(.strip, .narrow) td > span { min-width: 0; }
  table:not(.strip, .narrow) td::before { content: attr(data-label); color: var(--muted); text-align: left;
      white-space: nowrap; }
  table.narrow :is(th, td):not(:last-child) { padding-right: 10px; } table.narrow td small { display: block; }
  .heat .lane { grid-template-columns: minmax(0, 1fr); }
}
@media print { :root { color-scheme: light; } section { break-inside: avoid-page;
} nav, #filter, .viewer > button { display: none; } }
"""
)
