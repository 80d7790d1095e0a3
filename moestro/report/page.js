(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var config = { displaylogo: false, displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  var plots = Object.keys(figures).map(function (key) {
    var node = document.getElementById(key);
    node.style.height = figures[key].layout.height + "px";
    Plotly.newPlot(node, figures[key].data, figures[key].layout, config);
    return node;
  });
  // Plotly's own `responsive` follows the window only, not a card that changes its width inside it.
  var printing = false;
  var widths = new Map();
  var observer = new ResizeObserver(function (entries) {
    entries.forEach(function (entry) {
      var width = Math.round(entry.contentRect.width);
      if (printing || width === 0 || widths.get(entry.target) === width) { return; }
      widths.set(entry.target, width);
      Plotly.relayout(entry.target, { width: width });
    });
  });
  plots.forEach(function (node) { observer.observe(node); });
  // Plots keep the width of the screen when printed; A4 inside its margins is about 690 px wide.
  window.addEventListener("beforeprint", function () {
    printing = true;
    plots.forEach(function (node) { Plotly.relayout(node, { width: 640 }); });
    document.querySelectorAll("details").forEach(function (node) { node.open = true; });
  });
  window.addEventListener("afterprint", function () {
    printing = false;
    plots.forEach(function (node) { Plotly.relayout(node, { width: widths.get(node) }); });
  });
})();
