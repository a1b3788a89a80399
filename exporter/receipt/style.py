"""How a report looks as a page: one style sheet, light and dark, for a desk, a phone and paper. Tables, no logic.

Layers have the hues that the dashboards give them, Okabe and Ito's, which people with any colour vision tell apart,
darker on white and lighter on black until each stands out from what is behind it (3 to 1 for fills, 4.5 to 1 for words;
`tests/receipt/test_html_style.py`). What was not seen, and what could not be resolved, is hatched, each its own way.
Every colour stands beside its word.
"""

LIGHT = {
    "bg": "#faf9f7", "card": "#ffffff", "ink": "#1d1c1a", "mute": "#67635d", "line": "#e5e2dc", "track": "#f1eee9",
    "paid": "#4a4844", "busy": "#5b6b8c", "gau": "#d55e00", "ectr": "#b8568f", "emfu": "#2f88c2", "useful": "#00805d",
    "grey": "#8a867f", "pale": "#d8d4cd", "known": "#66a893", "kept": "#8b95a8", "lost": "#9c2a10",
}  # fmt: skip
DARK = {
    "bg": "#131312", "card": "#1c1b1a", "ink": "#ebe8e3", "mute": "#a5a099", "line": "#33312e", "track": "#2b2927",
    "paid": "#b9b4ac", "busy": "#9fb0d4", "gau": "#e8793a", "ectr": "#d68ab8", "emfu": "#56b4e9", "useful": "#2bb68c",
    "grey": "#8a867f", "pale": "#45423e", "known": "#1e6b54", "kept": "#727f99", "lost": "#f0866a",
}  # fmt: skip
FILLS = ("paid", "busy", "kept", "lost", "gau", "ectr", "emfu", "useful")
"""Fills of one colour; `unresolved` and `unobserved` are hatched."""

HATCHES = (
    '<svg class="defs" width="0" height="0" aria-hidden="true" focusable="false"><defs>'
    '<pattern id="unresolved" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="u1" width="7" height="7"/><rect class="u2" width="3" height="7"/></pattern>'
    '<pattern id="unobserved" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect class="n1" width="7" height="7"/><rect class="n2" width="2.5" height="7"/></pattern>'
    "</defs></svg>"
)


def _named(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


STYLE = (
    ":root{color-scheme:light dark;"
    + _named(LIGHT)
    + "}@media screen and (prefers-color-scheme:dark){:root{"
    + _named(DARK)
    + "}}"
    + "".join(f".fill.{name}{{fill:var(--{name})}}" for name in FILLS)
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main{max-width:62rem;margin:0 auto;padding:2.25rem 1.25rem 3rem}
h1{font-size:1.05rem;font-weight:600;margin:0;color:var(--mute)}
h2{font-size:1.15rem;font-weight:650;margin:0 0 .75rem}
h3{font-size:1rem;font-weight:650;margin:0}
p,ul,ol,dl{margin:0;padding:0}
section,figure{margin:2.25rem 0 0}
.headline{font-size:1.6rem;line-height:1.35;font-weight:400;margin:.35rem 0 1rem;max-width:50rem;text-wrap:pretty;
letter-spacing:-.01em}
.headline b{font-weight:680;white-space:nowrap}
.facts,.prose{list-style:none}
.facts{color:var(--mute);font-size:.95rem}
.prose{margin-top:.75rem}
.prose li+li{margin-top:.25rem}
.prose .sub{padding-left:1.5rem;color:var(--mute)}
.banner{background:#fbe29a;color:#3b2a00;padding:.7rem 1.25rem;font-weight:600;text-align:center}
figure{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:1.15rem 1.35rem 1.25rem}
figcaption{font-size:1.15rem;font-weight:650;margin-bottom:.9rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1.25rem;margin-top:2.25rem;
align-items:start}
.grid figure{margin:0;height:100%}
.grid .whole{grid-column:1/-1}
.half svg{max-width:30rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--ink);font-family:inherit}
svg .bold{font-weight:650}
svg .mute{fill:var(--mute)}
.defs{position:absolute}
.whole .narrow{display:none}
.fill.unresolved{fill:url(#unresolved)}
.fill.unobserved{fill:url(#unobserved)}
.track{fill:var(--track)}
.axis{stroke:var(--mute);stroke-width:1}
.rule{stroke:var(--line);stroke-width:1}
.joint{stroke:var(--mute);stroke-width:1;stroke-dasharray:2 2}
.tick{stroke:var(--ink);stroke-width:1.5}
.goal{stroke:var(--ink);stroke-width:1.25;stroke-dasharray:6 4}
.curve{fill:none;stroke:var(--useful);stroke-width:2.25;stroke-linejoin:round}
.u1{fill:var(--known)}.u2{fill:var(--useful)}.n1{fill:var(--pale)}.n2{fill:var(--grey)}
.leaks{list-style:none;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,14rem),1fr));gap:1rem}
.leak{background:var(--card);border:1px solid var(--line);border-top:5px solid var(--is);border-radius:12px;
padding:.9rem 1.15rem 1.1rem}
.leak.gau{--is:var(--gau)}.leak.ectr{--is:var(--ectr)}.leak.emfu{--is:var(--emfu)}
.leak .much{color:var(--mute);font-size:.92rem;margin-top:.1rem}
.leak .much b{color:var(--ink)}
.leak .do{margin-top:.6rem}
.leak dl{margin-top:.6rem;font-size:.9rem;color:var(--mute);display:grid;grid-template-columns:auto 1fr;gap:.1rem .6rem}
.leak dd{margin:0;color:var(--ink)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:12px}
table{border-collapse:collapse;width:100%;font-size:.94rem}
th,td{text-align:left;vertical-align:baseline;padding:.42rem .9rem;border-top:1px solid var(--line)}
thead td{border-top:0}
thead th{border-top:0;font-size:.86rem;font-weight:500;color:var(--mute)}
thead th:first-child{color:var(--ink);font-weight:650;font-size:.94rem}
tbody th{font-weight:500;min-width:8.5rem}
td{overflow-wrap:break-word;max-width:24rem}
.pairs th{width:19rem;color:var(--mute);font-weight:400}
.pairs tr:first-child>*,.bare tr:first-child>*{border-top:0}
.n{text-align:right;white-space:nowrap}
.one,.leak .much span{display:inline-block;max-width:100%}
footer{margin-top:2.75rem;padding-top:1.1rem;border-top:1px solid var(--line);color:var(--mute);font-size:.88rem}
footer h2{font-size:.95rem;color:var(--ink)}
footer dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}
footer dt{color:var(--ink);font-weight:600}
footer dd{margin:0}
footer p{margin-top:.9rem}
@media screen and (max-width:44rem){
.wide{display:none}.whole .narrow{display:block}
main{padding:1.4rem 1rem 2rem}
.headline{font-size:1.28rem}
section,figure{margin-top:1.75rem}
figure{background:none;border:0;border-radius:0;padding:0}
table{font-size:.88rem}
th,td{padding:.4rem .55rem}
tbody th{min-width:7.8rem}
.scroll{background:linear-gradient(90deg,var(--card) 30%,transparent) 0 0/3rem 100% no-repeat local,
linear-gradient(270deg,var(--card) 30%,transparent) 100% 0/3rem 100% no-repeat local,
linear-gradient(90deg,var(--pale),transparent) 0 0/.8rem 100% no-repeat scroll,
linear-gradient(270deg,var(--pale),transparent) 100% 0/.8rem 100% no-repeat scroll,var(--card)}
.pairs th{width:45%}
footer dl{grid-template-columns:1fr}
footer dd{margin-bottom:.4rem}
}
@page{size:A4;margin:14mm 14mm 16mm}
@media print{
:root{color-scheme:light}
body{background:none;font-size:10.5pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:none;padding:0}
figure,section{margin-top:1.1rem}
figure,.leak,tr,.prose li,footer dl{break-inside:avoid}
figure{padding:.7rem .9rem .8rem}
.leaks{grid-template-columns:repeat(3,1fr);gap:.8rem}
.leak{padding:.6rem .8rem .7rem}
.grid{grid-template-columns:1fr 1fr;gap:.8rem;margin-top:1.1rem}
h2,h3,figcaption{break-after:avoid}
thead{display:table-header-group}
.scroll{overflow:visible}
table{font-size:9pt}
th,td{padding:.22rem .6rem}
p,li{orphans:3;widows:3}
}
"""
)
