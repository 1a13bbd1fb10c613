// The search, and the list of pages on a phone. Nothing is asked of a server: the index is a script beside the pages.
"use strict";
const query = document.getElementById("query"), hits = document.getElementById("hits"), menu = document.getElementById("menu");
const pages = document.getElementById("pages");
const MOST = 12, AROUND = 60; // results shown; characters on each side of what was found

if (innerWidth < 832) query.placeholder = "Search";
menu.addEventListener("click", () => {
  menu.setAttribute("aria-expanded", pages.classList.toggle("open"));
});
const here = pages.querySelector("[aria-current]");
if (here) pages.scrollTop = here.offsetTop - pages.clientHeight / 2; // scrollIntoView would move the page as well

let loading = null;
function load() {
  loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = query.dataset.index;
    script.onload = () => resolve(window.PAGES);
    document.head.append(script);
  });
  return loading;
}

// How well a section answers all words; 0 where one is missing. An option counts most: `kv-heads` is `--kv-heads`.
function score(section, words) {
  let total = 0;
  for (const word of words) {
    const named = section.title.includes(word), count = section.words.split(word).length - 1;
    if (!named && !count) return 0;
    const whole = new RegExp(`(^|[^a-z0-9_-])${word.replace(/[^a-z0-9]/g, "\\$&")}($|[^a-z0-9_-])`);
    total += (named ? 12 : 0) + (whole.test(section.title) ? 12 : 0) + Math.min(count, 5) + (whole.test(section.words) ? 3 : 0);
    if (section.words.includes(`--${word.replace(/^-+/, "")} `)) total += section.address.startsWith("command/") ? 30 : 8;
  }
  return total;
}

function snippet(section, word) {
  const place = Math.max(0, section.words.indexOf(word));
  const text = section.text.slice(Math.max(0, place - AROUND), place + word.length + AROUND);
  const small = document.createElement("small"), at = text.toLowerCase().indexOf(word);
  if (at < 0) {
    small.textContent = text;
    return small;
  }
  const mark = document.createElement("mark");
  mark.textContent = text.slice(at, at + word.length);
  small.append(`${place > AROUND ? "…" : ""}${text.slice(0, at)}`, mark, `${text.slice(at + word.length)}…`);
  return small;
}

async function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  hits.hidden = !words.length;
  if (!words.length) return;
  const sections = await load();
  const best = sections.map((section) => [score(section, words), section]).filter(([points]) => points);
  best.sort(([a], [b]) => b - a);
  hits.replaceChildren(...best.slice(0, MOST).map(([, section]) => {
    const link = document.createElement("a"), name = document.createElement("b");
    link.href = `${query.dataset.base}/${section.address}`;
    name.textContent = section.name;
    link.append(name, snippet(section, words[0]));
    return link;
  }));
  if (!best.length) {
    const none = document.createElement("p");
    none.textContent = `No page has ${words.join(" and ")}.`;
    hits.append(none);
  }
}

query.addEventListener("input", search);
query.addEventListener("focus", load);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hits.hidden = true;
  if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) {
    event.preventDefault();
    query.focus();
  }
  const links = [...hits.querySelectorAll("a")], place = links.indexOf(document.activeElement);
  if (hits.hidden || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
  event.preventDefault();
  (links[place + (event.key === "ArrowDown" ? 1 : -1)] ?? query).focus();
});
query.addEventListener("keydown", (event) => {
  if (event.key === "Enter") hits.querySelector("a")?.click();
});
document.addEventListener("click", (event) => {
  if (!hits.contains(event.target) && event.target !== query) hits.hidden = true;
});
