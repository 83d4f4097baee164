"use strict";
// Decisions on a pilot batch: kept in this browser as they are made, saved as the sheet that `memcalib build --reviews` takes.
const tools = document.getElementById("tools");
const forms = [...document.querySelectorAll("form.decide")];
const columns = ["row", "item", "result", "stage", "issue", "about", "domain", "query"];

function addIssue(form, issue) {
  const line = document.getElementById("issue").content.firstElementChild.cloneNode(true);
  const about = line.querySelector("[name=about]");
  for (const part of form.closest("section").querySelectorAll("[data-about]")) about.append(new Option(part.dataset.about, part.dataset.about));
  for (const name of ["stage", "about", "issue"]) line.querySelector(`[name=${name}]`).value = (issue && issue[name]) || "";
  form.querySelector(".issues").append(line);
}

function decision(form) {
  const chosen = form.querySelector("[name=result]:checked");
  const issues = [...form.querySelectorAll(".issue")].map((line) =>
    Object.fromEntries(["stage", "about", "issue"].map((name) => [name, line.querySelector(`[name=${name}]`).value.trim()])));
  return { result: chosen ? chosen.value : "", issues: issues.filter((issue) => issue.stage || issue.about || issue.issue) };
}

function show(form, made) {
  for (const choice of form.querySelectorAll("[name=result]")) choice.checked = choice.value === made.result;
  form.querySelector(".issues").replaceChildren();
  for (const issue of made.issues) addIssue(form, issue);
}

function fault(made) {
  if (made.result === "fail" && !made.issues.length) return "a fail needs a stage and what is wrong";
  if (made.result === "fail" && made.issues.some((issue) => !issue.stage || !issue.issue)) return "each issue needs a stage and what is wrong";
  if (made.result !== "fail" && made.issues.length) return "an issue is written down, and the row does not fail";
  return "";
}

function update() {
  const all = forms.map(decision);
  const count = (result) => all.filter((made) => made.result === result).length;
  forms.forEach((form, place) => {
    const made = all[place], wrong = fault(made);
    form.classList.toggle("open", made.result === "fail");
    if (made.result === "fail" && !form.querySelector(".issue")) addIssue(form);
    form.querySelector(".wrong").textContent = wrong;
    const link = document.querySelector(`nav a[href="#row-${form.dataset.row}"]`);
    if (link) link.dataset.result = wrong ? "wrong" : made.result;
  });
  const kept = Object.fromEntries(forms.map((form, place) => [form.dataset.item, all[place]]));
  let saved = "kept in this browser";
  try { localStorage.setItem(tools.dataset.key, JSON.stringify(kept)); } catch { saved = "not kept: this browser keeps nothing for files, so save the sheet before you close the page"; }
  tools.querySelector("output").textContent = `${count("pass")} passed, ${count("fail")} failed, ${count("")} left of ${forms.length}; ${saved}`;
  return all;
}

function cell(text) {
  const risky = /^'*\s*[=+\-@\t\r\n\0\ufeff＝＋－＠]/.test(text) && !/^[+-]?\d+(\.\d+)?$/.test(text);
  return `"${(risky ? `'${text}` : text).replaceAll('"', '""')}"`;
}

function sheet(all) {
  const lines = [columns];
  forms.forEach((form, place) => {
    const { row, item, domain, query } = form.dataset, { result, issues } = all[place];
    for (const one of result === "fail" ? issues : [{}]) lines.push([row, item, result, one.stage || "", one.issue || "", one.about || "", domain, query]);
  });
  return `\ufeff${lines.map((line) => line.map(cell).join(",")).join("\r\n")}\r\n`;
}

function save() {
  const all = update(), place = all.findIndex((made) => fault(made));
  if (place >= 0) return forms[place].closest("section").scrollIntoView();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([sheet(all)], { type: "text/csv" }));
  link.download = tools.dataset.file;
  link.click();
  URL.revokeObjectURL(link.href);
}

let before = {};
try { before = JSON.parse(localStorage.getItem(tools.dataset.key)) || {}; } catch { before = {}; }
for (const form of forms) {
  show(form, before[form.dataset.item] || decision(form));
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("[data-do=add]").addEventListener("click", () => { addIssue(form); update(); });
  form.querySelector("[data-do=clear]").addEventListener("click", () => { show(form, { result: "", issues: [] }); update(); });
}
tools.querySelector("[data-do=save]").addEventListener("click", save);
tools.hidden = false;
update();
