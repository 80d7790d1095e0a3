(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var config = { displaylogo: false, responsive: true, displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  var plots = Object.keys(figures).map(function (key) {
    var node = document.getElementById(key);
    Plotly.newPlot(node, figures[key].data, figures[key].layout, config);
    return node;
  });
  // Plots keep the width of the screen when printed; A4 inside its margins is about 690 px wide.
  window.addEventListener("beforeprint", function () {
    plots.forEach(function (node) { Plotly.relayout(node, { autosize: false, width: 640 }); });
    document.querySelectorAll("details").forEach(function (node) { node.open = true; });
  });
  window.addEventListener("afterprint", function () {
    plots.forEach(function (node) { Plotly.relayout(node, { autosize: true, width: null }); });
  });
})();
