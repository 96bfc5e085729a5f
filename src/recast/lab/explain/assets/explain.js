"use strict";
/* The page: the selection (picture, layer, view, query, head), and drawing it. */
const page = (() => {
  const scene = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const chosen = { picture: 0, layer: Math.max(0, scene.order.indexOf(scene.first)), view: "mix", each: null, photo: true, at: [0.5, 0.5], head: -1 };
  const { number } = Words;
  const cache = new Map();
  let shown = null; // maps of all heads, as last drawn
  let drawing = Promise.resolve();

  const VIEWS = {
    mix: ["Whole", "the map that the layer uses"],
    position: ["Position", "only the tap and its Gaussian"],
    content: ["Content", "only the similarity of pixels"],
  };
  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  const picture = () => scene.pictures[chosen.picture];
  const name = () => scene.order[chosen.layer];
  const layer = () => scene.layers[name()];
  const hasClasses = () => layer()?.kind === "classes"; // maps without a query, laid over the image

  function stored() {
    const key = `${chosen.picture}/${name()}`;
    if (!cache.has(key)) {
      cache.set(key, Maps.unpack(picture().maps[name()]));
      if (cache.size > 32) cache.delete(cache.keys().next().value); // the oldest: unpacked maps are large
    }
    return cache.get(key);
  }

  // ---- the query: a place on the image (shares of its height and width), and the nearest query of the layer

  function placeOf(of, axis, index) { // middle of a query's pixel as a share of the layer's input
    const [start, step, count] = of.keys[axis];
    return ((of.queries[axis][0] + of.queries[axis][1] * index - start) / step + 0.5) / count;
  }
  function queryAt(of) {
    return [0, 1].map((axis) => {
      const places = Array.from({ length: of.queries[axis][2] }, (_, i) => placeOf(of, axis, i));
      return Maps.nearest(places, chosen.at[axis]);
    });
  }
  function boxOf(of, query) {
    return [0, 1].map((axis) => {
      const side = 1 / of.keys[axis][2];
      return [Math.max(0, Math.min(1 - side, placeOf(of, axis, query[axis]) - side / 2)), side];
    });
  }
  function put(box, span) {
    const [[top, height], [left, width]] = box;
    Object.assign(span.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * width}%`, height: `${100 * height}%` });
  }

  // ---- drawing

  function makeGrid(of, stored) {
    const [heads, names, laid] = [Maps.heads(of, stored), Maps.names(of, stored), of.kind === "classes"];
    const all = Array.from({ length: heads }, (_, head) => head);
    const drawn = all.filter((head) => !Maps.isTap(of, head));
    const count = drawn.length;
    const onGrid = of.offsets.length && of.kernel[0] * of.kernel[1] === count;
    const columns = onGrid ? of.kernel[1] : laid ? Math.min(heads, heads === 4 ? 2 : 3) : count <= 3 ? count : Math.ceil(Math.sqrt(count));
    by("grid").style.setProperty("--columns", columns);
    by("grid").classList.toggle("dense", columns > 5);
    by("grid").classList.toggle("laid", laid && chosen.photo);
    by("grid").classList.toggle("one", !laid && count === 1);
    by("grid").classList.toggle("few", !laid && count === 2);
    const [kernel, text] = by("taps").children;
    kernel.style.setProperty("--columns", of.kernel[1]);
    kernel.replaceChildren(...all.map((head) => element("b", { className: Maps.isTap(of, head) ? "" : "content" })));
    text.textContent = Words.taps(of, heads - count, heads);
    by("grid").replaceChildren(...drawn.map((head) => {
      const caption = element("span", { className: "caption" }, element("b", { textContent: Words.tap(of, names, head) }));
      const [gate] = Words.gates(of, head);
      if (gate) caption.append(element("span", { textContent: `${gate[0]} ${number(gate[1])}` }));
      const frame = element("span", { className: "picture" }, element("canvas"), element("span", { className: "none", textContent: "no content map" }), element("span", { className: "query" }));
      if (laid && chosen.photo) frame.prepend(element("img", { src: picture().src, alt: "" }));
      frame.style.aspectRatio = `${of.keys[1][2]} / ${of.keys[0][2]}`;
      const button = element("button", { type: "button", className: "head" }, frame, caption);
      button.dataset.head = head;
      button.addEventListener("click", () => choose({ head: chosen.head === head ? -1 : head }));
      button.addEventListener("pointerenter", () => overlay(head));
      button.addEventListener("pointerleave", () => overlay(chosen.head));
      button.addEventListener("focus", () => overlay(head));
      button.addEventListener("blur", () => overlay(chosen.head));
      return button;
    }));
  }

  function overlay(head) {
    const canvas = by("overlay");
    canvas.hidden = !shown?.maps[head];
    const laid = !canvas.hidden && shown.of.kind === "classes";
    by("stage").classList.toggle("laid", laid && chosen.photo);
    if (canvas.hidden) return;
    const [rows, columns] = [shown.of.keys[0][2], shown.of.keys[1][2]];
    if (laid) return void Colors.lay(canvas, shown.maps[head], rows, columns, shown.signed, chosen.photo);
    const limit = shown.each ? shown.limits[head] : shown.limit;
    Colors.paint(canvas, shown.maps[head], rows, columns, limit, shown.signed, (share) => 0.12 + 0.78 * Math.sqrt(share));
  }

  async function drawMaps() {
    const [of, key] = [picture().maps[name()] && layer(), JSON.stringify(chosen)];
    const grid = by("grid");
    const missing = of ? "" : Words.absent(scene, name());
    by("nothing").hidden = !missing;
    by("nothing").textContent = missing;
    for (const id of ["grid", "legend", "chosen"]) by(id).hidden = !of;
    by("layer-name").textContent = name() || "";
    const size = of && of.offsets.length ? `, input ${of.keys[0][2]}×${of.keys[1][2]}` : "";
    by("layer-about").textContent = of ? `${of.description}${size}` : "";
    by("cursor").hidden = !of;
    drawStage(of);
    if (!of) {
      shown = null;
      by("scales").hidden = by("taps").hidden = true;
      overlay(-1);
      by("where").textContent = "";
      return;
    }
    const from = await stored();
    if (key !== JSON.stringify(chosen)) return; // something else was chosen meanwhile
    const view = Maps.views(of).includes(chosen.view) ? chosen.view : "mix";
    const query = queryAt(of);
    const maps = Array.from({ length: Maps.heads(of, from) }, (_, head) => (!Maps.isTap(of, head) && Maps.has(of, view, head) ? Maps.map(of, from, view, head, query) : null));
    const present = maps.filter(Boolean);
    const common = present.length ? Colors.limitOf(present) : 1;
    const each = present.length > 1 && (chosen.each ?? Colors.mostBlank(present, common));
    by("scales").hidden = of.kind === "classes" || present.length < 2;
    by("taps").hidden = !maps.some((_, head) => Maps.isTap(of, head));
    const limits = each ? maps.map((values) => values && Colors.limitOf([values])) : null;
    for (const input of by("scales").querySelectorAll("input")) input.checked = String(each) === input.value;
    const names = Maps.names(of, from);
    const laid = of.kind === "classes";
    const namesState = from.names.length > 0; // names of this image already state the attention on the token
    shown = { of, maps, names, namesState, query, view, each, limits, limit: common, signed: Maps.isSigned(of, view, from) };
    const gridKey = `${name()}${laid || from.names.length ? `/${chosen.picture}/${chosen.photo}` : ""}`;
    if (grid.dataset.key !== gridKey) makeGrid(of, from);
    grid.dataset.key = gridKey;
    const box = boxOf(of, query);
    const [rows, columns] = [of.keys[0][2], of.keys[1][2]];
    for (const button of grid.children) {
      const head = Number(button.dataset.head);
      const canvas = button.querySelector("canvas");
      canvas.hidden = !maps[head];
      button.querySelector(".none").hidden = Boolean(maps[head]);
      put(box, button.querySelector(".query"));
      button.querySelector(".query").hidden = laid || !maps[head];
      button.setAttribute("aria-pressed", String(head === chosen.head));
      const gate = Words.gates(of, head).slice(0, 1).map(([symbol, value]) => ` ${symbol} = ${number(value)};`).join("");
      const label = `${laid ? "Map" : "Head"} ${head + 1}, ${Words.tapInWords(of, names, head)}:${gate}`;
      if (!maps[head]) {
        button.setAttribute("aria-label", `${label} no content map`);
        continue;
      }
      if (laid) Colors.lay(canvas, maps[head], rows, columns, shown.signed, chosen.photo);
      else Colors.paint(canvas, maps[head], rows, columns, each ? limits[head] : shown.limit, shown.signed);
      const top = Words.largest(maps[head], columns);
      button.setAttribute("aria-label", `${label} largest weight ${number(top.value)} at row ${top.row + 1}, column ${top.column + 1}`);
    }
    put(box, by("cursor"));
    by("cursor").hidden = laid;
    overlay(chosen.head);
    by("legend").hidden = !present.length;
    drawLegend();
    const queries = of.queries.map((axis) => axis[2]);
    by("where").textContent = laid ? "" : `Query row ${query[0] + 1} of ${queries[0]}, column ${query[1] + 1} of ${queries[1]}`;
    by("chosen").textContent = Words.head(shown, chosen.head);
  }

  // the image accepts a query, or shows the chosen map
  function drawStage(of) {
    const takes = Boolean(of) && of.kind !== "classes";
    const stage = by("stage");
    stage.classList.toggle("still", !takes);
    stage.tabIndex = takes ? 0 : -1;
    stage.setAttribute("role", takes ? "application" : "group");
    stage.setAttribute("aria-label", takes ? "Query pixel: click, or move it with the arrow keys" : "The image, with the chosen map over it");
    by("heads").setAttribute("aria-label", takes ? "Heads" : "Maps");
  }

  function drawLegend() {
    const [low, bar, high] = by("legend").children;
    if (shown.of.kind === "classes") {
      bar.style.background = Colors.gradient(shown.signed, true);
      const range = chosen.head >= 0 && chosen.head < shown.maps.length ? Maps.range(shown.maps[chosen.head]) : null;
      by("legend").hidden = Boolean(range?.even); // one colour has no scale
      const size = range && Math.max(-range.least, range.most);
      const ends = !range ? (shown.signed ? ["−", "+"] : ["smallest", "largest"]) : shown.signed ? Words.pair(-size, size) : Words.pair(range.least, range.most);
      [low.textContent, high.textContent] = ends;
      return;
    }
    bar.style.background = Colors.gradient(shown.signed);
    const end = shown.each ? "per head" : number(shown.limit);
    low.textContent = shown.signed ? (shown.each ? "−" : `≤ −${end}`) : "0";
    high.textContent = shown.each ? end : `≥ ${end}`;
  }

  function drawPredictions() {
    const at = picture();
    const { predictions } = at;
    const arms = Object.keys(scene.arms).filter((arm) => predictions[arm]);
    by("predictions").hidden = !arms.length;
    by("predictions").replaceChildren(element("h2", {}, "Predictions", element("span", { textContent: Words.SCALES[scene.scale] })), ...arms.map((arm) => {
      const chip = element("span", { className: `chip ${arm}`, ariaHidden: "true" });
      const list = element("ol", { className: `top ${arm}` }, ...predictions[arm].map(([label, p]) => {
        const bar = element("i", { ariaHidden: "true" });
        bar.style.width = scene.scale === "logits" ? "0" : `${100 * p}%`;
        const right = label === at.label ? element("em", { textContent: " ✓", title: "the image’s label" }) : "";
        return element("li", {}, element("span", { className: "class", title: label }, label, right), element("span", { className: "rail" }, bar), element("span", { className: "p", textContent: Words.value(scene, p) }));
      }));
      return element("div", { className: "arm" }, element("h3", {}, chip, scene.arms[arm]), list);
    }));
    by("verdict").textContent = Words.verdict(scene, arms, predictions, at);
  }

  function drawPicture() {
    const at = picture();
    by("image").src = at.src;
    by("image").alt = `${at.name}${at.label === null ? "" : `, label ${at.label}`}: network input, ${at.size[0]}×${at.size[1]} pixels`;
    by("stage").style.aspectRatio = `${at.size[1]} / ${at.size[0]}`;
    by("stage").classList.toggle("small", Math.max(...at.size) < 128);
    const facts = [`${at.name}, network input ${at.size[0]}×${at.size[1]}`, ...(at.label === null ? [] : [`label ${at.label}`])];
    by("about").textContent = `${facts.join(", ")}.`;
    by("notes").replaceChildren(...[...at.notes, ...scene.notes].map((note) => element("p", { className: "note", textContent: note })));
  }

  function drawControls() {
    const of = layer();
    for (const input of document.querySelectorAll(".choices input")) input.checked = String(chosen[input.name]) === input.value;
    const views = of ? Maps.views(of) : [];
    by("views").hidden = views.length < 2;
    by("photos").hidden = !hasClasses();
    [...by("thumbs").children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === chosen.picture)));
    document.querySelectorAll("#layers label").forEach((label, i) => label.classList.toggle("absent", !picture().maps[scene.order[i]]));
  }

  // Change what is chosen and draw it; the promise is for what must be unpacked first.
  function choose(change) {
    const had = hasClasses();
    Object.assign(chosen, change);
    // the first map of a layer without a query lies over the image until it is removed; other layers start with none
    if (!("head" in change) && (had !== hasClasses() || ("layer" in change && hasClasses() && chosen.head > 0))) chosen.head = hasClasses() ? 0 : -1;
    if ("picture" in change) drawPicture();
    if ("picture" in change) drawPredictions();
    drawControls();
    drawing = drawMaps();
    return drawing;
  }

  // ---- controls

  function choices(id, field, options) {
    by(id).querySelector(".choices").replaceChildren(...options.map(([value, text, title]) => {
      const input = element("input", { type: "radio", name: field, value });
      input.addEventListener("change", () => choose({ [field]: typeof chosen[field] === "number" ? Number(value) : /^(true|false)$/.test(value) ? value === "true" : value }));
      return element("label", { title: title || "" }, input, element("span", { textContent: text }));
    }));
  }

  function moveTo(event) {
    if (hasClasses()) return;
    const box = by("stage").getBoundingClientRect();
    const within = (x) => Math.max(0, Math.min(1, x));
    choose({ at: [within((event.clientY - box.top) / box.height), within((event.clientX - box.left) / box.width)] });
  }
  function step(down, right) {
    const of = layer();
    if (!of || hasClasses()) return;
    const query = queryAt(of).map((index, axis) => Math.max(0, Math.min(of.queries[axis][2] - 1, index + [down, right][axis])));
    choose({ at: query.map((index, axis) => placeOf(of, axis, index)) });
  }
  const among = (list, index) => Math.max(0, Math.min(list.length - 1, index));

  function listen() {
    const stage = by("stage");
    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || hasClasses()) return;
      stage.setPointerCapture(event.pointerId);
      moveTo(event);
    });
    stage.addEventListener("pointermove", (event) => {
      if (stage.hasPointerCapture(event.pointerId)) moveTo(event);
    });
    stage.addEventListener("keydown", (event) => {
      const way = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!way || hasClasses() || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      step(...way);
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { key } = event;
      if (key >= "1" && key <= "9" && Number(key) <= scene.order.length) choose({ layer: Number(key) - 1 });
      else if ((key === "[" || key === "]") && scene.order.length) choose({ layer: among(scene.order, chosen.layer + (key === "]" ? 1 : -1)) });
      else if (key === "Escape") choose({ head: -1 });
    });
  }

  function start() {
    choices("layers", "layer", scene.order.map((layer, i) => [String(i), layer]));
    choices("views", "view", Object.entries(VIEWS).map(([view, [text, title]]) => [view, text, title]));
    choices("scales", "each", [["false", "All heads", "one scale for all heads of the layer"], ["true", "Each head", "one scale per head"]]);
    choices("photos", "photo", [["true", "Over the photo", "larger weights hide more of the grey photo"], ["false", "Alone", "the map without the photo"]]);
    by("layers").hidden = scene.order.length < 1;
    const kinds = Object.values(scene.layers).map((of) => of.kind);
    for (const part of document.querySelectorAll(".of-queries")) part.hidden = kinds.every((kind) => kind === "classes");
    if (hasClasses()) chosen.head = 0;
    by("thumbs").hidden = scene.pictures.length < 2;
    by("thumbs").append(...scene.pictures.map((at, i) => {
      const button = element("button", { type: "button", title: at.name }, element("img", { src: at.src, alt: at.label === null ? at.name : `${at.name}, label ${at.label}` }));
      button.addEventListener("click", () => choose({ picture: i }));
      return button;
    }));
    by("made").hidden = !scene.facts.length;
    by("made").querySelector("dl").append(...scene.facts.flatMap(([term, value]) => [element("dt", { textContent: term }), element("dd", { textContent: value })]));
    by("formula").textContent = Words.formula(scene);
    listen();
    Colors.whenSchemeChanges(() => choose({}));
    drawPicture();
    drawPredictions();
    if (!("DecompressionStream" in window)) {
      by("nothing").hidden = false;
      by("nothing").textContent = "This browser cannot unpack the maps: use Firefox 113, Safari 16.4, Chrome 80, or newer.";
      for (const id of ["grid", "legend", "controls"]) by(id).hidden = true;
      return Promise.resolve();
    }
    const done = choose({});
    const list = by("layers").querySelector(".choices"); // the first layer shown may be the last of many
    const first = list.querySelector(":checked")?.parentElement;
    if (first) list.scrollTop = first.offsetTop - list.offsetTop - 4;
    return done;
  }

  // for tests and measurements: `ready` when the first maps are drawn, at `readyAt` milliseconds after the navigation
  const handle = { scene, chosen, choose, drawn: () => drawing, maps: () => shown, readyAt: null };
  handle.ready = start().then(() => { handle.readyAt = performance.now(); });
  return handle;
})();
