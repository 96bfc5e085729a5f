"use strict";
// Tooltips by pointer, touch and arrow keys, and enlarged figures. The page also works without this script.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  let current = null;

  function show(hit) {
    if (hit === current) return;
    current?.classList.remove("on");
    current = hit;
    tip.hidden = !hit;
    if (!hit) return;
    hit.classList.add("on");
    tip.textContent = hit.dataset.tip;
    const host = hit.closest("dialog") ?? document.body;
    if (tip.parentNode !== host) host.append(tip);
    const at = hit.getBoundingClientRect(), from = host === document.body ? { left: -scrollX, top: -scrollY } : host.getBoundingClientRect();
    const edge = document.documentElement.clientWidth;
    const left = Math.max(6, Math.min(at.left + at.width / 2 - tip.offsetWidth / 2, edge - tip.offsetWidth - 6));
    const above = at.top - tip.offsetHeight - 6;
    tip.style.left = `${left - from.left}px`;
    tip.style.top = `${(above > 4 ? above : at.bottom + 6) - from.top + (host.scrollTop && host !== document.body ? host.scrollTop : 0)}px`;
  }

  function nearest(svg, x, y) {
    let best = null, least = 28;
    for (const hit of svg.querySelectorAll(".hit")) {
      const box = hit.getBoundingClientRect();
      const far = Math.hypot(box.left + box.width / 2 - x, box.top + box.height / 2 - y);
      if (far < least) [best, least] = [hit, far];
    }
    return best;
  }

  function enliven(svg) {
    const hits = [...svg.querySelectorAll(".hit")];
    if (!hits.length) return;
    // replace the browser's own tooltip, which would cover ours
    for (const hit of hits) {
      const title = hit.querySelector("title");
      if (title) hit.dataset.tip = title.textContent, title.remove();
    }
    svg.tabIndex = 0;
    svg.setAttribute("aria-description", "Use the arrow keys to move between values.");
    const point = event => show(nearest(svg, event.clientX, event.clientY));
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") show(null); });
    svg.addEventListener("blur", () => show(null));
    svg.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape" && current) show(null), event.preventDefault();
      if (!step) return;
      event.preventDefault();
      const here = hits.indexOf(current);
      show(hits[here < 0 ? (step > 0 ? 0 : hits.length - 1) : (here + step + hits.length) % hits.length]);
    });
  }

  const dialog = document.createElement("dialog");
  const title = document.createElement("h2"), text = document.createElement("p"), close = document.createElement("button");
  const stage = document.createElement("div");
  title.id = "large-title";
  dialog.setAttribute("aria-labelledby", title.id);
  close.className = "close";
  close.type = "button";
  close.textContent = "×";
  close.setAttribute("aria-label", "Close");
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => { show(null); document.body.append(tip); stage.replaceChildren(); });
  dialog.append(title, stage, text, close);
  document.body.append(dialog);

  for (const figure of document.querySelectorAll("figure.card")) {
    const svg = figure.querySelector("svg");
    if (!svg) continue;
    enliven(svg);
    const button = document.createElement("button");
    const name = figure.querySelector("figcaption")?.textContent.trim() ?? "figure";
    button.className = "enlarge";
    button.type = "button";
    button.setAttribute("aria-label", `Enlarge: ${name}`);
    button.innerHTML = '<svg viewBox="0 0 16 16" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.6"><path d="M9.5 2H14v4.5M14 2 9 7M6.5 14H2V9.5M2 14l5-5"/></svg>';
    button.addEventListener("click", () => {
      title.textContent = name;
      text.textContent = svg.getAttribute("aria-label") ?? "";
      const large = svg.cloneNode(true);
      stage.replaceChildren(large);
      enliven(large);
      dialog.showModal();
    });
    figure.append(button);
  }
  // links open the fold they point into; printing opens all folds
  function reveal(link) {
    const target = document.getElementById(decodeURIComponent(new URL(link).hash.slice(1)));
    if (!target) return;
    for (let at = target.querySelector(":scope > details") ?? target; at; at = at.parentElement) if (at.matches("details")) at.open = true;
    target.scrollIntoView();
  }
  addEventListener("hashchange", () => reveal(location.href));
  document.addEventListener("click", event => { const link = event.target.closest?.('a[href^="#"]'); if (link) reveal(link.href); });
  reveal(location.href);
  let shut = [];
  addEventListener("beforeprint", () => { shut = [...document.querySelectorAll("details:not([open])")]; for (const fold of shut) fold.open = true; });
  addEventListener("afterprint", () => { for (const fold of shut) fold.open = false; });

  addEventListener("pointerdown", event => { if (!event.target.closest?.("svg")) show(null); });
})();
