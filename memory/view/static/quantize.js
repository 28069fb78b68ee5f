"use strict";
// Draws the error by layer. The function `page_data` of the page's module makes `data`.
(() => {
  const data = base.data();
  const percent = (share) => Number((100 * share).toPrecision(3)) + " %";
  const LOOKS = { rounding: "--c-workspace", written: "--c-params", "residual stream": "--c-cache" };

  const draw = () => {
    const x = data.layers, names = Object.keys(data.shares);
    const tips = (i) => [`layer ${x[i]}`, ...names.map((name) => ({ name, color: `var(${LOOKS[name]})`,
      value: percent(data.shares[name][i]) }))];
    charts.xy("error", {
      x: { title: "layer", range: [x[0] - 0.5, x[x.length - 1] + 0.5], whole: true },
      y: { title: "error, share of the mean square", type: "log", format: percent },
      series: names.map((name) => ({ kind: "line", name: name === "rounding" ? "round to nearest" : name, x,
        y: data.shares[name].map((share) => (share > 0 ? share : null)), color: `var(${LOOKS[name]})`, symbol: "circle",
        dash: name === "residual stream" ? "dash" : undefined, tips })),
    });
  };

  base.start(draw);
})();
