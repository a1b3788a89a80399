"""How the page looks: one colour a leak, one mark a state, one style sheet. Tables, no logic.

Colours are told apart by lightness as well as by hue: losses of allocation are purple, of computing time
vermilion, of model FLOPs amber, useful work is blue, and what nobody knows is hatched grey. Purple, vermilion, amber
and blue are the hues of Okabe and Ito's palette, which people with any colour vision can keep apart. No green: where
nothing is known, nothing may look well. Every colour stands beside its word.
"""

COLOURS = {
    "useful": "#1f77c9",
    "unavailable": "#5b3a8c",
    "idle_allocation": "#9a6fc4",
    "oversized_allocation": "#cdb2e6",
    "hung": "#8f1d0a",
    "failure_recovery": "#e07a5a",
    "startup": "#f3b29b",
    "checkpoint": "#c9502b",
    "data_stall": "#a8381a",
    "kv_cache_wait": "#eb9377",
    "batching": "#d8633f",
    "host_overhead": "#f0a48b",
    "unattributed_stall": "#dd6f4c",
    "exposed_communication": "#b7431f",
    "prefill_decode_interference": "#f7c8b8",
    "pipeline_bubble": "#8a6100",
    "memory_bound": "#e6a700",
    "low_parallelism": "#b98400",
    "other_compute": "#f6cf5f",
    "throttled": "#6e4d00",
    "rejected_speculation": "#d29600",
    "kv_cache_pressure": "#fbe29a",
    "recomputation": "#a27300",
    "padding": "#efbb2e",
    "rework": "#c79a2e",
    "unresolved": "url(#unresolved)",
    "unobserved": "url(#unobserved)",
}
"""Fill of each value of the label `leak`, in light and in dark alike."""

HATCHES = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="unresolved" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#a9cbea"/><rect width="2" height="6" fill="#5f97c8"/></pattern>'
    '<pattern id="unobserved" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="6" height="6" fill="#c9c6c0"/><rect width="2" height="6" fill="#98948d"/></pattern>'
    "</defs></svg>"
)

MARKS = {
    "unavailable": "✕",
    "hung": "■",
    "unobserved": "?",
    "unowned": "▲",
    "zombie": "◌",
    "unallocated": "○",
    "stalled": "◐",
    "active": "●",
}
"""A shape beside each state's word, for those to whom its colour says nothing; the worst first."""

LOWERS = {"gau": "allocated", "ectr": "computing", "emfu": "useful"}
"""Which factor of the page's sentence a loss of each layer lowers."""

STYLE = """
:root{color-scheme:light dark;--bg:#faf9f7;--card:#fff;--ink:#1d1c1a;--mute:#67635d;--line:#e5e2dc;--blue:#1a5fa3;
--red:#9c2a10;--amber:#7d5800;--purple:#5f3f92;--grey:#67635d;--loud:#fbe29a;--loudink:#3b2a00;--alarm:#8f1d0a}
@media (prefers-color-scheme:dark){:root{--bg:#131312;--card:#1c1b1a;--ink:#ebe8e3;--mute:#a5a099;--line:#33312e;
--blue:#7db8ef;--red:#ff9b7d;--amber:#f0c24d;--purple:#c5a6ea;--grey:#a5a099;--alarm:#a52a10}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:break-word}
main{max-width:76rem;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.5rem;font-weight:650;letter-spacing:-.01em;margin:0}
h2{font-size:.8rem;font-weight:600;letter-spacing:.08em;text-transform:uppercase;color:var(--mute);
margin:2.5rem 0 .75rem}
h3{font-size:1rem;font-weight:600;margin:0}
p{margin:0}
a{color:var(--blue)}
small,.mute{color:var(--mute);font-weight:400}
.banner{padding:.75rem 1.25rem;font-weight:600;text-align:center}
.simulated{background:var(--loud);color:var(--loudink)}
.simulated b{letter-spacing:.14em}
.alarm{background:var(--alarm);color:#fff}
.sentence{font-size:1.35rem;line-height:1.55;font-weight:400;margin:1.75rem 0 1.25rem;max-width:58rem;text-wrap:pretty}
.sentence b{font-weight:650;white-space:nowrap}
.sentence .is{font-size:1.75rem}
.note{color:var(--mute);margin:.5rem 0 0;max-width:58rem}
.defs{position:absolute}
.bar{display:block;width:100%;border-radius:4px;background:var(--line)}
.swatch{flex:none;width:.7em;height:.7em;border-radius:2px;margin-right:.5em;vertical-align:baseline}
.gpus{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,33rem),1fr));gap:1rem}
.gpu{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--is);border-radius:10px;
padding:1rem 1.15rem;display:flex;
flex-direction:column;gap:.65rem}
.top{display:flex;flex-wrap:wrap;gap:.15rem 1rem;justify-content:space-between;align-items:baseline}
.state b{font-weight:650}
.state{color:var(--mute)}
.active{--is:var(--blue)}.stalled{--is:var(--amber)}.zombie,.unallocated{--is:var(--purple)}
.hung,.unavailable,.unowned{--is:var(--red)}.unobserved{--is:var(--grey)}
.state b,.states b{color:var(--is)}.unobserved .state b{font-style:italic}
.states{display:flex;flex-wrap:wrap;gap:.1rem 1.5rem;list-style:none;margin:1rem 0 0;padding:0}
.suspect{color:var(--red);font-weight:600}
.stale{--is:var(--grey)}.stale .gpu,.stale .states li{--is:var(--grey)}.stale .state b,
.stale .states b{font-style:italic}
.equation{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem}
.equation b{font-weight:650}
.summary .losses{margin-top:.75rem}
.losses{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:0;padding:0;list-style:none;font-size:.92rem}
.losses b{font-weight:600}
.facts{display:flex;flex-wrap:wrap;gap:.1rem 1.25rem;margin:0;font-size:.92rem;border-top:1px solid var(--line);
padding-top:.6rem}
.facts div{display:flex;gap:.4em}
.facts dt{color:var(--mute)}
.facts dd{margin:0}
.none{color:var(--mute);font-style:italic}
.unsupported{color:var(--mute);border-bottom:1px dotted var(--mute)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:baseline;padding:.5rem .9rem;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:.85rem;font-weight:500;color:var(--mute);white-space:nowrap}
tbody th{font-weight:600}
.n{text-align:right;white-space:nowrap}
.name{min-width:11rem;overflow-wrap:anywhere}
.wide{min-width:14rem;color:var(--mute)}
.tight{white-space:nowrap}
footer{margin-top:2.5rem;color:var(--mute);font-size:.92rem}
footer p+p{margin-top:.35rem}
@media (max-width:36rem){main{padding:1.25rem .9rem 2rem}.sentence{font-size:1.15rem}.sentence .is{font-size:1.4rem}
.gpu{padding:.9rem}th,td{padding:.45rem .7rem}}
"""
