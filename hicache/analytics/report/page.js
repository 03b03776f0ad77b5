"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const names = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  const order = ["auto", "light", "dark"];
  let theme = /^#theme-(light|dark)$/.exec(location.hash)?.[1] ?? "auto";
  const dress = () => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = names[theme];
  };
  button.hidden = false;
  button.addEventListener("click", () => { theme = order[(order.indexOf(theme) + 1) % 3]; dress(); });
  dress();

  for (const drawing of document.querySelectorAll(".drawing")) {
    const figure = drawing.closest("figure");
    const told = JSON.parse(figure.querySelector("script").textContent);
    const hidden = new Set();
    const box = document.createElement("div");
    box.className = "readout";
    box.hidden = true;
    const heard = document.createElement("div");
    heard.className = "heard";
    heard.setAttribute("aria-live", "polite");
    drawing.append(box, heard);
    let stop = -1;

    const svg = () => [...drawing.querySelectorAll("svg")].find((each) => each.getClientRects().length);
    const spots = () => {
      // Where something can be told: for lines each x that has a point, for bars each piece.
      const found = new Map();
      for (const node of svg().querySelectorAll(".pt, .seg")) {
        const owner = node.closest("[data-s]");
        if (hidden.has(owner.dataset.s)) continue;
        const i = Number(node.dataset.i);
        if (node.classList.contains("seg")) {
          const place = node.getBBox(), b = Number(node.dataset.b);
          found.set(`${b} ${i}`, { x: place.x + place.width / 2, y: place.y, b, node, lines: told.bars[b][i] });
        } else {
          const x = node.cx.baseVal.value, y = node.cy.baseVal.value;
          const spot = found.get(x) ?? { x, y, of: new Map() };
          spot.y = Math.min(spot.y, y);
          spot.of.set(owner.dataset.s, told.series[Number(owner.dataset.s)][i]);  // of several at one place the last
          found.set(x, spot);
        }
      }
      for (const spot of found.values()) {
        if (spot.of) spot.lines = [...new Set([...spot.of.values()].flat())];
      }
      return [...found.values()].sort((a, b) => (a.b ?? 0) - (b.b ?? 0) || a.x - b.x);
    };
    const show = (spot, aloud) => {
      const drawn = svg(), view = drawn.viewBox.baseVal, scale = drawn.clientWidth / view.width;
      drawing.classList.add("on");
      const cursor = drawn.querySelector(".cursor");
      if (cursor) { cursor.setAttribute("x1", spot.x); cursor.setAttribute("x2", spot.x); }
      for (const each of drawn.querySelectorAll(".seg")) each.classList.toggle("dim", Boolean(spot.node) && each !== spot.node);
      box.textContent = spot.lines.join("\n");
      box.hidden = false;
      const left = spot.x * scale, wide = box.offsetWidth, room = drawing.clientWidth;
      box.style.left = `${Math.max(0, left + wide + 12 > room ? Math.min(left - wide - 12, room - wide) : left + 12)}px`;
      box.style.top = `${Math.max(0, spot.node ? (spot.y + 26) * scale : Math.min(spot.y * scale, drawn.clientHeight - box.offsetHeight))}px`;
      if (aloud) heard.textContent = spot.lines.join(", ");
    };
    const hide = () => {
      box.hidden = true;
      stop = -1;
      drawing.classList.remove("on");
      for (const each of drawing.querySelectorAll(".dim")) each.classList.remove("dim");
    };
    const point = (event) => {
      const drawn = svg(), place = drawn.getBoundingClientRect(), scale = drawn.viewBox.baseVal.width / place.width;
      const x = (event.clientX - place.left) * scale, y = (event.clientY - place.top) * scale;
      let best = null, least = Infinity;
      for (const spot of spots()) {
        const far = spot.node ? Math.hypot(Math.max(0, Math.abs(x - spot.x) - spot.node.getBBox().width / 2), 4 * (y - spot.y - 10))
          : Math.hypot(x - spot.x, told.dots ? y - spot.y : 0);
        if (far < least) { least = far; best = spot; }
      }
      if (best) show(best, false); else hide();
    };
    drawing.tabIndex = 0;
    drawing.setAttribute("role", "group");
    drawing.setAttribute("aria-label", `${figure.querySelector("h3").textContent}: arrow keys tell its points`);
    drawing.addEventListener("pointermove", point);
    drawing.addEventListener("pointerdown", point);
    drawing.addEventListener("pointerleave", hide);
    drawing.addEventListener("blur", hide);
    drawing.addEventListener("keydown", (event) => {
      const all = spots(), steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (event.key === "Escape") hide();
      else if (event.key === "Home") stop = 0;
      else if (event.key === "End") stop = all.length - 1;
      else if (event.key in steps) stop = Math.min(all.length - 1, Math.max(0, stop + steps[event.key]));
      else return;
      event.preventDefault();
      if (stop >= 0 && all.length) show(all[Math.min(stop, all.length - 1)], true);
    });

    for (const item of figure.querySelectorAll(".legend li")) {
      const toggle = document.createElement("button");
      toggle.type = "button";
      toggle.append(...item.firstElementChild.childNodes);
      toggle.setAttribute("aria-pressed", "true");
      item.replaceChildren(toggle);
      toggle.addEventListener("click", () => {
        const number = item.dataset.s, off = !hidden.delete(number);
        if (off) hidden.add(number);
        toggle.setAttribute("aria-pressed", String(!off));
        for (const each of drawing.querySelectorAll(`.series[data-s="${number}"]`)) each.classList.toggle("off", off);
        hide();
      });
    }
  }
})();
