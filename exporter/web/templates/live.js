"use strict";
(() => {
const root = document.documentElement, page = document.getElementById("page"), gone = document.getElementById("gone");
const pulse = document.getElementById("pulse"), every = 1000 * root.dataset.every, timeout = 8000;
const filled = new WeakSet();  // elements with a job report that was fetched on opening: updates of the page skip them
let answered = Date.now(), timer = 0, pending = null;

const keyOf = (node) => node.nodeType === 1 ? node.id || node.getAttribute("data-key") || "" : "";

function patch(old, fresh) {
  if (old.nodeType !== 1) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (!filled.has(old)) patchChildren(old, fresh);
}

function patchChildren(old, fresh) {
  const known = new Map(), wanted = new Set();
  for (const child of old.childNodes) if (keyOf(child)) known.set(keyOf(child), child);
  for (const child of fresh.childNodes) if (keyOf(child)) wanted.add(keyOf(child));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = keyOf(child);
    while (at && keyOf(at) && !wanted.has(keyOf(at))) { const next = at.nextSibling; at.remove(); at = next; }
    let found = key ? known.get(key) : at && !keyOf(at) ? at : null;
    if (found && found.nodeName !== child.nodeName) found = null;
    if (!found) { old.insertBefore(document.importNode(child, true), at); continue; }
    if (found === at) at = at.nextSibling; else old.insertBefore(found, at);
    patch(found, child);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

function selecting() {
  const chosen = getSelection();
  return chosen.rangeCount > 0 && !chosen.isCollapsed && chosen.containsNode(page, true);
}

function update(fresh) {
  const pulseNow = fresh.getElementById("pulse");
  gone.hidden = true;
  root.classList.remove("gone");
  if (selecting()) { pulse.textContent = "paused while text is selected, " + pulse.dataset.asof; return; }
  const active = document.activeElement;
  patch(page, fresh.getElementById("page"));
  if (active && active !== document.activeElement && active.isConnected) active.focus({ preventScroll: true });
  if (document.title !== fresh.title) document.title = fresh.title;
  pulse.dataset.asof = pulseNow.dataset.asof;
  pulse.textContent = pulseNow.dataset.live ? "live, " + pulseNow.dataset.asof : pulseNow.dataset.asof;
  pulse.className = pulseNow.dataset.live ? "live" : "";
}

function showProblem(reason) {
  const text = reason + (pulse.dataset.asof ? " Values below are " + pulse.dataset.asof + "." : "");
  root.classList.add("gone");
  pulse.className = "";
  pulse.textContent = pulse.dataset.asof;
  if (gone.textContent !== text) gone.textContent = text;
  gone.hidden = false;
}

function receive(request) {
  const fresh = request.response;
  if (!fresh || !fresh.getElementById("page"))
    return showProblem("The daemon responded with HTTP " + request.status + " instead of this page.");
  if (fresh.documentElement.dataset.version !== root.dataset.version) return location.reload();
  answered = Date.now();
  update(fresh);
}

function get(path, then, fail) {
  const request = new XMLHttpRequest();
  request.open("GET", path);
  request.responseType = "document";
  request.timeout = timeout;
  request.onload = () => then(request);
  request.onerror = request.ontimeout = fail;
  request.send();
  return request;
}

function refresh() {
  clearTimeout(timer);
  if (pending || document.hidden) return;
  const reschedule = () => { pending = null; timer = setTimeout(refresh, every); };
  const here = location.pathname + location.search;
  pending = get(here, (request) => { reschedule(); receive(request); }, () => { reschedule(); showProblem("The daemon does not answer."); });
}

function resume() {
  if (document.hidden) return;
  if (Date.now() - answered > 3 * every + timeout) showProblem("This page was not updated while it was hidden.");
  refresh();
}

function open(event) {
  const box = event.target.nodeName === "DETAILS" && event.target.open && event.target.querySelector("[data-from]");
  if (!box || filled.has(box)) return;
  filled.add(box);
  const fail = () => filled.delete(box);
  get(box.dataset.from, (request) => {
    const found = request.response && request.response.getElementById("receipt");
    if (!found) return fail();
    const copy = document.importNode(found, true);
    copy.removeAttribute("id");
    box.replaceChildren(copy);
  }, fail);
}

page.addEventListener("toggle", open, true);
document.addEventListener("visibilitychange", resume);
document.addEventListener("selectionchange", () => { if (!selecting() && /^paused/.test(pulse.textContent)) refresh(); });
window.addEventListener("pageshow", (event) => { if (event.persisted) resume(); });
pulse.textContent = (pulse.dataset.live ? "live, " : "") + pulse.dataset.asof;
pulse.className = pulse.dataset.live ? "live" : "";
timer = setTimeout(refresh, every);
})();
