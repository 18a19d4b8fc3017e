"use strict";
(() => {
  // The page as it came, before anything below changes it: a saved copy is this text with other names.
  const pristine = "<!DOCTYPE html>\n" + document.documentElement.outerHTML;
  const data = JSON.parse(document.getElementById("data").textContent);
  const kept = JSON.parse(document.getElementById("names").textContent);
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const one = (id) => document.getElementById(id);

  // ---------------------------------------------------------------- names

  const storageKey = `drsa-names-${data.id}`;
  const names = data.defaults.map((name, k) => kept[k] || name);

  function remembered() {
    try { return JSON.parse(localStorage.getItem(storageKey)) || {}; } catch { return {}; }
  }

  function remember() {
    const changed = {};
    names.forEach((name, k) => { if (name !== (kept[k] || data.defaults[k])) changed[k] = name; });
    try {
      if (Object.keys(changed).length) localStorage.setItem(storageKey, JSON.stringify(changed));
      else localStorage.removeItem(storageKey);
    } catch { return false; }
    return true;
  }

  function showNames() {
    for (const node of all("[data-name]")) node.textContent = names[Number(node.dataset.name)];
    for (const input of all("input.name")) input.value = names[Number(input.dataset.concept)];
  }

  function rename(input) {
    const k = Number(input.dataset.concept);
    const name = input.value.trim() || data.defaults[k];
    const isTaken = names.some((other, i) => i !== k && other === name);
    input.setAttribute("aria-invalid", String(isTaken));
    if (isTaken) { state(`“${name}” is taken by another concept.`); return; }
    names[k] = name;
    const isKept = remember();
    showNames();
    draw();
    state(isKept ? "Kept in this browser; save a copy to mail it." : "Not kept: save a copy before you close the page.");
  }

  function state(text) { one("names-state").textContent = text; }

  function save(text, type, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function pageWithNames() {
    const safe = JSON.stringify(Object.fromEntries(names.map((name, k) => [k, name])))
      .replace(/[<>&]/g, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
    const begin = '<script type="application/json" id="names">';
    const at = pristine.indexOf(begin) + begin.length;
    return pristine.slice(0, at) + safe + pristine.slice(pristine.indexOf("<\/script>", at));
  }

  const fileName = decodeURIComponent(location.pathname.split("/").pop() || "report.html");
  one("save-copy").addEventListener("click", () => save(pageWithNames(), "text/html", fileName));
  one("save-names").addEventListener("click", () => {
    const text = JSON.stringify(Object.fromEntries(data.defaults.map((old, k) => [old, names[k]])), null, 1);
    save(text, "application/json", "names.json");
  });
  one("reset-names").addEventListener("click", () => {
    data.defaults.forEach((name, k) => { names[k] = kept[k] || name; });
    remember();
    showNames();
    draw();
    state("The names are those of the file again.");
  });
  for (const input of all("input.name")) {
    input.addEventListener("change", () => rename(input));
  }

  // ---------------------------------------------------------------- one image

  const view = one("view"), paint = view.getContext("2d");
  const layer = document.createElement("canvas");
  layer.width = data.width;
  layer.height = data.height;
  const thumbs = all("#thumbs button"), boxes = all("[data-on]");
  let chosen = 0;

  function mapsOf(image) {
    if (!image.decoded) image.decoded = Int8Array.from(atob(image.maps), (sign) => sign.charCodeAt(0));
    return image.decoded;
  }

  // A pixel's colour from the values of the concepts that are on, 1 being full relevance.
  function inColours(values, on) {
    let red = 0, green = 0, blue = 0, total = 0;
    for (const k of on) {
      const value = Math.max(0, values[k]);
      red += value * data.colours[k][0];
      green += value * data.colours[k][1];
      blue += value * data.colours[k][2];
      total += value;
    }
    return total > 0 ? [red / total, green / total, blue / total, Math.sqrt(Math.min(1, total))] : [0, 0, 0, 0];
  }

  function asSum(values, on) {
    let sum = 0;
    for (const k of on) sum += values[k];
    const strength = Math.sqrt(Math.min(1, Math.abs(sum)));
    return sum >= 0 ? [200, 16, 46, strength] : [31, 78, 200, strength];
  }

  function draw() {
    const image = data.images[chosen], maps = mapsOf(image), size = data.width * data.height;
    const on = boxes.filter((box) => box.checked).map((box) => Number(box.dataset.on));
    const colour = one("mode-sum").checked ? asSum : inColours;
    const blend = Number(one("blend").value) / 100;
    const brush = layer.getContext("2d"), pixels = brush.createImageData(data.width, data.height);
    const values = new Array(data.defaults.length);
    for (let p = 0; p < size; p++) {
      for (const k of on) values[k] = maps[k * size + p] / 127;
      const [red, green, blue, strength] = colour(values, on);
      pixels.data.set([red, green, blue, 255 * strength * blend], 4 * p);
    }
    brush.putImageData(pixels, 0, 0);
    const photo = thumbs[chosen].querySelector("img");
    paint.imageSmoothingEnabled = true;
    paint.globalAlpha = 1;
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, view.width, view.height);
    paint.globalAlpha = on.length ? 1 - 0.45 * blend : 1;
    if (photo.complete && photo.naturalWidth) paint.drawImage(photo, 0, 0, view.width, view.height);
    paint.globalAlpha = 1;
    paint.drawImage(layer, 0, 0, view.width, view.height);
    describe(image, on);
  }

  function describe(image, on) {
    const largest = Math.max(...image.relevance.map(Math.abs)) || 1;
    image.relevance.forEach((value, k) => {
      const bar = document.querySelector(`[data-bar="${k}"]`);
      bar.style.width = `${(100 * Math.abs(value)) / largest}%`;
      bar.classList.toggle("against", value < 0);
      const share = value > 0 ? ` (${Math.round(100 * image.shares[k])}%)` : "";
      document.querySelector(`[data-value="${k}"]`).textContent = `${value.toPrecision(3)}${share}`;
    });
    const rank = ["", `predicted as ${data.target}, `][image.rank] ?? `${data.target} is only number ${image.rank}, `;
    const shown = on.length ? on.map((k) => names[k]).join(", ") : "no concept";
    one("view-caption").textContent = `${image.name}: ${rank}score ${image.score.toPrecision(3)}. Shown: ${shown}.`;
    view.setAttribute("aria-label", `${image.name} with ${shown}`);
  }

  function choose(number) {
    chosen = (number + data.images.length) % data.images.length;
    thumbs.forEach((button, n) => button.setAttribute("aria-pressed", String(n === chosen)));
    draw();
  }

  thumbs.forEach((button, n) => button.addEventListener("click", () => choose(n)));
  one("thumbs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(thumbs.indexOf(document.activeElement) + step);
    thumbs[chosen].focus();
  });
  for (const link of all("[data-show]")) link.addEventListener("click", () => choose(Number(link.dataset.show)));
  for (const node of [...boxes, ...all('[name="mode"]')]) node.addEventListener("change", draw);
  one("blend").addEventListener("input", draw);
  for (const [id, isOn] of [["all-on", true], ["all-off", false]]) {
    one(id).addEventListener("click", () => { boxes.forEach((box) => { box.checked = isOn; }); draw(); });
  }
  addEventListener("beforeprint", () => all("details").forEach((node) => { node.open = true; }));

  for (const [k, name] of Object.entries(remembered())) if (names[k] !== undefined) names[k] = name;
  showNames();
  const ready = thumbs.map((button) => button.querySelector("img").decode().catch(() => undefined));
  Promise.all(ready).then(draw);
})();
