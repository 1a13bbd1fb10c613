// --- The whole page ---

function redraw() {
  drawGrid();
  if (view.open >= 0) showHead();
}

// A switch stands on the page and in the large view; both change together.
function listenToSwitch(kind, set) {
  const boxes = [...document.querySelectorAll('.' + kind)];
  for (const box of boxes) {
    box.addEventListener('change', () => {
      for (const other of boxes) other.checked = box.checked;
      set(box.checked);
      redraw();
    });
  }
}

function listenToFilter() {
  byId('find').addEventListener('input', (event) => searchFor(event.target.value));
  byId('all-heads').addEventListener('click', showAll);
  for (const button of document.querySelectorAll('.choose')) {
    button.disabled = false;
    button.addEventListener('click', () => toggleRole(button));
  }
}

function listenToTable() {
  const body = table.tBodies[0], cellOf = (event) => event.target.closest('td, th');
  body.addEventListener('keydown', walkTable);
  body.addEventListener('click', (event) => openHead(Number(cellOf(event).parentElement.dataset.number), cellOf(event)));
  body.addEventListener('mouseover', (event) => { if (cellOf(event)) showTip(cellOf(event)); });
  body.addEventListener('mouseleave', hideTip);
  body.addEventListener('focusin', (event) => showTip(cellOf(event)));
  body.addEventListener('focusout', hideTip);
  table.parentElement.addEventListener('scroll', hideTip);
  byId('all-columns')?.addEventListener('change', (event) => table.classList.toggle('all', event.target.checked));
}

function listenToHead() {
  const dialog = byId('large');
  byId('previous').addEventListener('click', () => stepHead(-1));
  byId('next').addEventListener('click', () => stepHead(1));
  byId('close').addEventListener('click', () => dialog.close());
  byId('exact').checked = true;
  byId('exact').addEventListener('change', (event) => {
    view.exact = event.target.checked;
    beginHead();
  });
  dialog.addEventListener('close', closed);
  dialog.addEventListener('keydown', keysInDialog);
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  byId('map').addEventListener('pointermove', (event) => { if (event.pointerType === 'mouse') pointAt(event); });
  byId('map').addEventListener('click', pointAt);
}

function listen() {
  byId('grid').addEventListener('keydown', walkGrid);
  listenToFilter();
  listenToTable();
  listenToHead();
  listenToSwitch('hide-first', (on) => { view.hideFirst = on; });
  listenToSwitch('log-scale', (on) => { view.log = on; });
  for (const radio of document.querySelectorAll('[name="view"]')) {
    radio.addEventListener('change', () => { view.which = radio.value; redraw(); });
  }
  document.addEventListener('keydown', (event) => { if (event.key === 'Escape') hideTip(); });
  window.addEventListener('resize', () => { hideTip(); if (view.open >= 0) showHead(); });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { buildRamps(); redraw(); });
}

const model = readData('model')?.weights ? readModel(readData('model')) : null; // null where it does not run here
if (model) offer(model);
byId('heads').hidden = false;
buildRamps();
makeGrid();
makeTable();
listen();
drawGrid();
