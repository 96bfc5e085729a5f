"use strict";
// Enlarged figures, and folds that open for links and print. The page also works without this script.
(() => {
  const dialog = document.createElement("dialog");
  const title = document.createElement("h2"), stage = document.createElement("div"), close = document.createElement("button");
  title.id = "large-title";
  dialog.setAttribute("aria-labelledby", title.id);
  close.className = "close";
  close.type = "button";
  close.textContent = "×";
  close.setAttribute("aria-label", "Close");
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
  dialog.append(title, stage, close);
  document.body.append(dialog);

  for (const svg of document.querySelectorAll("figure.card > svg")) {
    const button = document.createElement("button");
    const name = svg.getAttribute("aria-label");
    button.className = "enlarge";
    button.type = "button";
    button.setAttribute("aria-label", `Enlarge: ${name}`);
    button.innerHTML = '<svg viewBox="0 0 16 16" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.6"><path d="M9.5 2H14v4.5M14 2 9 7M6.5 14H2V9.5M2 14l5-5"/></svg>';
    button.addEventListener("click", () => {
      title.textContent = name;
      stage.replaceChildren(svg.cloneNode(true));
      dialog.showModal();
    });
    svg.parentNode.append(button);
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
})();
