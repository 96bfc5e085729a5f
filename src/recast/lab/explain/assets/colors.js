"use strict";
/* Colour-blind safe palettes: cividis for weights from 0 up; blue to orange for signed weights, through the background
   of the page, so that 0 is quiet in light and dark mode. */
const Colors = (() => {
  const POSITIVE = ["#00224d", "#002d69", "#1a386f", "#31436c", "#434e6b", "#52596c", "#61646f", "#6e7073", "#7c7b78",
    "#8b8778", "#9b9376", "#aba072", "#bbad6c", "#ccbb63", "#dec957", "#efd846", "#fde737"];
  const LIGHT = ["#08306b", "#0a5a9e", "#3f8cc7", "#93c0e0", "#f7f5f0", "#f5c79b", "#e88a3c", "#c55a02", "#6e2d00"];
  const DARK = ["#b5dcff", "#62b2ec", "#2b78b0", "#214a68", "#23272d", "#5f3a1c", "#ad5f1b", "#ff8b38", "#ffd9b8"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // over an image the quiet colour must be light in dark mode too
  const stops = (signed, laid) => (signed ? (dark.matches && !laid ? DARK : LIGHT) : POSITIVE);

  const tables = new Map();
  function table(signed, laid) {
    const key = stops(signed, laid);
    if (!tables.has(key)) tables.set(key, interpolated(key));
    return tables.get(key);
  }
  function interpolated(stops) {
    const parsed = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
    const colors = new Uint8ClampedArray(768);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (parsed.length - 1);
      const low = Math.min(Math.floor(place), parsed.length - 2);
      for (let c = 0; c < 3; c++) colors[3 * i + c] = parsed[low][c] + (place - low) * (parsed[low + 1][c] - parsed[low][c]);
    }
    return colors;
  }

  // Draws weights (rows × columns) onto a canvas, one pixel each; `see` gives the opacity of a share of the strongest.
  function paint(canvas, values, rows, columns, limit, signed, see) {
    draw(canvas, values, rows, columns, (value) => Math.max(-1, Math.min(1, value / limit)), signed, see, false);
  }

  // Draws a map from its smallest to its largest weight, a signed one symmetrically around 0. Over the photo, the opacity
  // grows with the weight, so that the photo keeps its brightness where there is little weight.
  function lay(canvas, values, rows, columns, signed, photo) {
    const { least, most, even } = Maps.range(values);
    const size = Math.max(-least, most) || 1;
    const share = signed ? (value) => value / size : even ? () => 0.5 : (value) => (value - least) / (most - least);
    draw(canvas, values, rows, columns, share, signed, photo && ((size) => 0.8 * size), true);
  }

  function draw(canvas, values, rows, columns, shareOf, signed, see, laid) {
    if (canvas.width !== columns || canvas.height !== rows) [canvas.width, canvas.height] = [columns, rows];
    const context = canvas.getContext("2d");
    const picture = context.createImageData(columns, rows);
    const colors = table(signed, laid);
    for (let i = 0; i < values.length; i++) {
      const share = shareOf(values[i]);
      const at = 3 * Math.round(255 * (signed ? (share + 1) / 2 : Math.max(0, share)));
      for (let c = 0; c < 3; c++) picture.data[4 * i + c] = colors[at + c];
      picture.data[4 * i + 3] = see ? 255 * see(Math.abs(share)) : 255;
    }
    context.putImageData(picture, 0, 0);
  }

  const gradient = (signed, laid) => `linear-gradient(90deg, ${stops(signed, laid).join(", ")})`;

  /* The weight of the strongest colour, for maps that share it. A head that is nearly the convolution has one weight
     near 1 and the rest a thousand times smaller: each map's largest is left out, and saturates. */
  function limitOf(maps) {
    const rest = [];
    const stride = Math.ceil(maps.length * maps[0].length / 50000); // a sample of very many weights is enough
    let largest = 0;
    for (const values of maps) {
      let [top, at] = [-1, -1];
      for (let i = 0; i < values.length; i++) if (Math.abs(values[i]) > top) [top, at] = [Math.abs(values[i]), i];
      for (let i = 0; i < values.length; i += stride) if (i !== at) rest.push(Math.abs(values[i]));
      largest = Math.max(largest, top);
    }
    const sorted = Float32Array.from(rest).sort();
    const limit = sorted.length ? sorted[Math.floor(0.995 * (sorted.length - 1))] : 0;
    return (limit > 1e-5 * largest ? limit : largest) || 1;
  }

  // True if most maps would be blank on a shared scale: only their largest weight reaches a tenth of it.
  function mostBlank(maps, limit) {
    const isBlank = (values) => values.reduce((count, value) => count + (Math.abs(value) > 0.1 * limit), 0) < 2;
    return maps.filter(isBlank).length > maps.length / 2;
  }

  return { paint, lay, mostBlank, gradient, limitOf, whenSchemeChanges: (then) => dark.addEventListener("change", then) };
})();
