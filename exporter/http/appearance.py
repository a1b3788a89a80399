"""How the page looks: one colour a leak, one mark a state, one style sheet. Tables, no logic.

Leaks have the colours that the dashboards give them: losses of allocation are warm, of computing time purple, of model
FLOPs blue, useful work is green, and what nobody knows is hatched grey. These are hues of Okabe and Ito's palette,
which people with any colour vision can keep apart; within a layer leaks differ in lightness. Every colour stands
beside its word.
"""

COLOURS = {
    "unavailable": "#AF2C1F",
    "idle_allocation": "#DE6F0E",
    "oversized_allocation": "#FBAC16",
    "hung": "#86319E",
    "failure_recovery": "#CB75D9",
    "startup": "#AD52B4",
    "checkpoint": "#F0A1F6",
    "data_stall": "#962E8A",
    "kv_cache_wait": "#DB6BC0",
    "batching": "#BB4999",
    "host_overhead": "#FF9ED8",
    "unattributed_stall": "#9F2A6C",
    "exposed_communication": "#E3679F",
    "prefill_decode_interference": "#C1487B",
    "pipeline_bubble": "#0B7D9E",
    "memory_bound": "#4AC6FA",
    "low_parallelism": "#016085",
    "other_compute": "#38A2DF",
    "throttled": "#0978B7",
    "rejected_speculation": "#78BEFD",
    "kv_cache_pressure": "#0C599D",
    "recomputation": "#609AE7",
    "padding": "#4370BD",
    "rework": "#95B6FD",
    "useful": "#009E73",
    "unresolved": "url(#unresolved)",
    "unobserved": "url(#unobserved)",
}
"""Fill of each value of the label `leak`, in light and in dark alike."""

BAND_COLOURS = (
    ("useful", "#009E73"),
    ("computing, not useful", "#38A2DF"),
    ("held, not computing", "#BB4999"),
    ("not at work", "#DE6F0E"),
    ("unobserved", "url(#unobserved)"),
)
"""Word and fill of what a moment's GPUs did, in the order of `lives.BANDS`."""

HATCHES = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="unresolved" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#dde1e5"/><rect width="2" height="6" fill="#9aa4af"/></pattern>'
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
--blue:#7db8ef;--red:#ff9b7d;--amber:#f0c24d;--purple:#c5a6ea;--grey:#a5a099;--alarm:#a52a10}
.step rect+rect,.bar rect,.swatch rect{stroke:#fff;stroke-opacity:.3;vector-effect:non-scaling-stroke}}
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
#pulse{position:fixed;z-index:1;top:.6rem;right:.75rem;margin:0;padding:.1rem .65rem;border-radius:1rem;
background:var(--card);border:1px solid var(--line);color:var(--mute);font-size:.85rem}
#pulse:empty{display:none}
#pulse.live::before{content:"";display:inline-block;width:.55em;height:.55em;border-radius:50%;background:var(--blue);
margin-right:.5em}
.banner{padding-left:13rem;padding-right:13rem}
#gone{position:sticky;top:0;z-index:1}
nav{margin-bottom:.5rem}.jump{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:.6rem 0 0}
.jump a{padding:.2rem 0}section[id]{scroll-margin-top:1rem}
.price{font-size:1.1rem;margin:-.5rem 0 1.25rem}
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
.fall{list-style:none;margin:0;padding:.35rem 0;background:var(--card);border:1px solid var(--line);border-radius:10px}
.fall>li{border-top:1px solid var(--line)}.fall>.head,.fall>.head+li{border-top:0}
.fall>.head,.fall>.sum,.fall summary{display:grid;grid-template-columns:15.5rem 1fr 3.6rem 5.6rem;gap:0 .9rem;
align-items:center;padding:.3rem .9rem}
.fall.priced>.head,.fall.priced>.sum,.fall.priced summary{grid-template-columns:15.5rem 1fr 3.6rem 5.6rem 5.6rem}
.fall>.head{font-size:.85rem;color:var(--mute);text-align:right}
.fall summary{cursor:pointer;list-style:none}.fall summary::-webkit-details-marker{display:none}
.fall summary .name::after{content:"\\203A";color:var(--mute);margin-left:.5em}
.fall details[open] .name::after{content:"\\2304"}
.fall summary:hover,.receipt>summary:hover{background:var(--bg)}
.fall>.sum{color:var(--mute)}.fall>.sum .step{opacity:.45}
.fall>.is .name,.fall>.is .n{font-weight:650}
.fall .name{min-width:0}
.step{display:block;width:100%}.step .rest{fill:var(--line);opacity:.45}
.advice{color:var(--mute);padding:.1rem .9rem .7rem 2.1rem;max-width:60rem}.advice b{color:var(--ink);font-weight:600}
.fall+.scroll,#page section[data-key=accounts]{margin-top:1rem}
.remedies{margin:0;padding-left:1.4rem}.remedies li+li{margin-top:.25rem}
.receipts{background:var(--card);border:1px solid var(--line);border-radius:10px;overflow:hidden}
.receipt+.receipt{border-top:1px solid var(--line)}
.receipt>summary{display:grid;
grid-template-columns:minmax(8rem,1.3fr) 6rem minmax(9rem,1fr) minmax(6rem,1.2fr) 6.5rem 11rem;
gap:.1rem 1rem;align-items:center;padding:.5rem .9rem;cursor:pointer;list-style:none}
.receipt>summary::-webkit-details-marker{display:none}
.receipt>summary .name{min-width:0}.receipt>summary .name::after{content:"\\203A";color:var(--mute);margin-left:.5em}
.receipt[open]>summary .name::after{content:"\\2304"}#receipt .own{display:none}.own{margin-right:1rem}
.receipt[open]>summary{border-bottom:1px solid var(--line)}
.receipt .inside{padding:.25rem 1.15rem 1.15rem}
.when,.who,.cost{color:var(--mute)}
#receipt h2,.inside h2{margin:1.75rem 0 .6rem}
.facts+.note{margin-top:.75rem}
.course{margin:0}.course>svg{display:block;width:100%;height:8rem;background:var(--line);border-radius:6px}
.course figcaption{display:flex;flex-wrap:wrap;gap:.25rem 1rem;justify-content:space-between;color:var(--mute);
font-size:.9rem;margin-top:.4rem}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:0;padding:0}
.events{list-style:none;margin:0;padding:0}.events li{padding:.2rem 0;display:flex;flex-wrap:wrap;gap:.1rem .75rem}
.events time,.events span{color:var(--mute)}
summary:focus-visible,.scroll:focus-visible,a:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
.fall summary:focus-visible,.receipt>summary:focus-visible{outline-offset:-2px}
.gone main,.stale main{filter:grayscale(1)}
.gone #page{--is:var(--grey)}.gone .gpu,.gone .states li{--is:var(--grey)}
.gone .state b,.gone .states b{font-style:italic}
.gone .state b::before,.gone .states b::before{content:"was "}.gone .ago{display:none}
.gone .now{font-size:0}.gone .now::after{content:"no data";font-size:.92rem;font-style:italic;color:var(--mute)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:baseline;padding:.5rem .8rem;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:.85rem;font-weight:500;color:var(--mute);vertical-align:bottom}
tbody th{font-weight:600}
.n{text-align:right;white-space:nowrap}
.name{min-width:10rem;overflow-wrap:anywhere}
.wide{min-width:11rem;color:var(--mute)}
.tight{white-space:nowrap}
footer{margin-top:2.5rem;color:var(--mute);font-size:.92rem}
footer p+p{margin-top:.35rem}
@media (max-width:60rem){.banner{padding-left:1.25rem;padding-right:1.25rem}#pulse{top:auto;bottom:.6rem}}
@media (max-width:36rem){main{padding:1.25rem .9rem 2rem}.sentence{font-size:1.15rem}.sentence .is{font-size:1.4rem}
.gpu{padding:.9rem}th,td{padding:.45rem .7rem}
.fall>.head{display:none}
.fall>.sum,.fall summary{grid-template-columns:1fr 2.6rem 3.6rem;gap:.1rem .4rem;font-size:.92rem;padding:.35rem .7rem}
.fall.priced>.sum,.fall.priced summary{grid-template-columns:1fr 2.6rem 3.6rem 3.6rem}
.fall .step{grid-row:2;grid-column:1/-1}.fall .hours::after{content:" h"}
.receipt>summary{grid-template-columns:1fr auto}.receipt .bar{grid-column:1/-1;grid-row:3}
.receipt .who{text-align:right}
.receipt>summary .cost{grid-column:1/-1;text-align:left}.receipt .inside{padding:.25rem .9rem .9rem}
.course>svg{height:6rem}
.course .key{order:1;flex-basis:100%}}
"""
