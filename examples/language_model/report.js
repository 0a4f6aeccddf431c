"use strict";
const { runs, figures } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse), (max-width: 600px)").matches;
// of plotly's buttons, none that sends the data to a server
const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: buttons, plotlyServerURL: "" };
const times = runs.map((run) => new Map(run.times));

function template() {
  const [text, back, line, middle] = dark.matches
    ? ["#e4e7eb", "#14171b", "#3a414a", "#2a2f36"]
    : ["#1b1f24", "#ffffff", "#d5d9de", "#f2f2f2"];
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line };
  const map = [[0, "#3b82f6"], [0.5, middle], [1, "#e8590c"]];
  return { layout: {
    paper_bgcolor: back, plot_bgcolor: back, font: { color: text, family: "system-ui, sans-serif", size: 12 },
    xaxis: axis, yaxis: { ...axis, automargin: true }, colorscale: { diverging: map }, hoverlabel: { bgcolor: back, font: { color: text }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: text, activecolor: text },
  } };
}

function along(trace, axis) {
  if (axis === "step" || trace.meta === undefined) return trace.steps;
  const { tokens } = runs[trace.meta];
  return trace.steps.map((step) => (axis === "tokens" ? step * tokens : times[trace.meta].get(step) ?? null));
}

function layout(figure, axis, log) {
  const moved = structuredClone(figure.layout);
  moved.template = template();
  if (touch) moved.dragmode = false; // a finger scrolls the page
  for (const name of Object.keys(moved).filter((key) => key.startsWith("xaxis"))) {
    if (moved[name].title?.text === "step") moved[name].title.text = axis;
  }
  if (log && moved.meta?.log) moved.yaxis = { ...moved.yaxis, type: "log", range: null, autorange: true };
  return moved;
}

function draw() {
  const axis = document.getElementById("x").value, log = document.getElementById("log").checked;
  figures.forEach((figure, number) => {
    const data = figure.data.map((trace) => ({ ...trace, x: along(trace, axis) }));
    Plotly.react(`plot${number}`, data, layout(figure, axis, log), CONFIG);
  });
}

for (const figure of figures) for (const trace of figure.data) trace.steps = trace.x;
for (const name of ["x", "log"]) document.getElementById(name).addEventListener("change", draw);
dark.addEventListener("change", draw);
draw();
