"use strict";
// Asks for the changing part of a run's page until the run is recorded, then shows all of it.
(() => {
  const place = document.querySelector("[data-live]");
  if (!place) return;
  const every = 1500;
  let failures = 0;
  const ask = async () => {
    try {
      const answer = await fetch(place.dataset.live);
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      const log = place.querySelector("pre");
      const below = log && log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
      place.innerHTML = text;
      const fresh = place.querySelector("pre");
      if (fresh && (below || !log)) fresh.scrollTop = fresh.scrollHeight;
      failures = 0;
      if (answer.headers.get("x-narrowgauge-open") === "no") { location.reload(); return; }
    } catch (error) {
      failures += 1;
    }
    if (failures < 20) setTimeout(ask, every * (1 + failures));
  };
  setTimeout(ask, every);
})();
