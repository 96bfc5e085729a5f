"use strict";
/* What the page says: numbers, places of taps, sentences. */
const Words = (() => {
  const ARROWS = { "-1,-1": "↖", "-1,0": "↑", "-1,1": "↗", "0,-1": "←", "0,0": "•", "0,1": "→", "1,-1": "↙", "1,0": "↓", "1,1": "↘" };

  const percent = (p) => `${p >= 0.9995 ? "100" : p >= 0.1 ? (100 * p).toFixed(0) : (100 * p).toFixed(1)} %`;
  const number = (x) => {
    const size = Math.abs(x);
    const digits = size >= 100 ? 0 : size >= 0.01 ? 2 : 3;
    const text = size === 0 ? "0" : size >= 0.0005 ? size.toFixed(digits) : size.toExponential(0);
    return (x < 0 && Number(text) ? "−" : "") + text.replace("e-", "e−").replace("e+", "e");
  };

  function tap(of, head) {
    if (of.names.length) return of.names[head];
    const [down, right] = of.offsets[head];
    return ARROWS[`${down},${right}`] || `${number(down)},${number(right)}`;
  }
  function tapInWords(of, head) {
    if (of.names.length) return of.names[head];
    const [down, right] = of.offsets[head];
    const words = [[down, "up", "down"], [right, "left", "right"]].filter(([by]) => by);
    return `tap ${words.length ? words.map(([by, less, more]) => `${Math.abs(by)} ${by < 0 ? less : more}`).join(", ") : "in the middle"}`;
  }
  function largest(values, columns) {
    let at = 0;
    for (let i = 1; i < values.length; i++) if (Math.abs(values[i]) > Math.abs(values[at])) at = i;
    return { value: values[at], row: Math.floor(at / columns), column: at % columns };
  }

  // of the chosen head: gates, largest weight, what falls on the padding
  function head({ of, maps }, chosen) {
    if (chosen < 0 || chosen >= maps.length) return "Choose a head to lay its map over the image.";
    const values = maps[chosen];
    const top = largest(values, of.keys[1][2]);
    const outside = 1 - values.reduce((sum, value) => sum + value, 0);
    const gates = of.gates.map(([symbol, of]) => `${symbol} = ${number(of[chosen])}`).join(", ");
    const words = tapInWords(of, chosen);
    return `${words[0].toUpperCase()}${words.slice(1)}${gates ? `: ${gates}` : ""}. ` +
      `Largest weight ${number(top.value)} at row ${top.row + 1}, column ${top.column + 1}` +
      `${of.kind !== "classes" && outside > 0.01 ? `; ${percent(outside)} falls on the padding around the image` : ""}.`;
  }

  // why a layer has no maps at a state
  function absent(scene, at, name) {
    if (!scene.order.length) return "This network has no recast layer, so there are no attention maps to show: only its predictions.";
    const epoch = scene.states[at].epoch;
    const later = scene.states.find((state, i) => i > at && state.layers[name]);
    return `At epoch ${epoch}, ${name} is still a convolution: it has no attention maps.` + (later ? ` It has them at epoch ${later.epoch}.` : "");
  }

  // who says what, in one sentence
  function verdict(scene, arms, found, at) {
    if (!arms.length) return `What the heads attend to in ${at.name}`;
    const best = arms.map((arm) => found[arm][0][0]);
    const own = arms.indexOf("recast") < 0 ? arms.length - 1 : arms.indexOf("recast");
    const label = at.label === null ? "" : ` The label is ${at.label}.`;
    const many = { 2: "Both networks say", 3: "All three networks say" }[arms.length];
    if (many && new Set(best).size === 1) return `${many} ${best[0]}${best[0] === at.label ? ", as it is labelled." : `.${label}`}`;
    const others = arms.map((arm, i) => [arm, i]).filter(([, i]) => i !== own).map(([arm, i]) => {
      const who = { parent: "the parent", finetuned: "the fine-tuned parent" }[arm] || scene.arms[arm];
      return `${who} ${best[i]}`;
    });
    return `${arms.length > 1 ? scene.arms[arms[own]] : "The network"} says ${[best[own], ...others].join(", ")}.${label}`;
  }

  function formula(scene) {
    const all = scene.states.flatMap((state) => Object.values(state.layers));
    const said = [];
    if (all.some((of) => of.shift)) said.push("A = (1−γ)·[(1−s)·S + s·G] + γ·C: γ is the share of content, s how far the tap has spread to a Gaussian of span 1/α. At γ = s = 0 a head is its tap of the convolution.");
    if (all.some((of) => of.kind === "gpsa" && !of.shift)) said.push("A = σ(λ)·G + (1−σ(λ))·C: 1−σ(λ) is the share of content, 1/α the span of the Gaussian.");
    if (all.some((of) => of.kind === "maps")) said.push("C-MHSA: position is a learned bias inside the softmax of the content, so only the whole can be shown.");
    if (all.length) said.push("A map shows how a head weighs the pixels of its layer’s input for the outlined query. A pixel of an inner layer has seen the surroundings of its place in the image. Colours end before the largest weights do, so that small ones can be seen.");
    return said.join(" ");
  }

  return { number, percent, tap, tapInWords, largest, head, absent, verdict, formula };
})();
