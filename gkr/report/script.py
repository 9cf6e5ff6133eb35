"""The page's only script. Everything can be read without it: it adds a filter and a player."""

SCRIPT = """
(() => {
  const filter = document.getElementById('filter');
  if (filter) {
    filter.hidden = false;
    const rows = [...document.querySelectorAll('.values tbody tr')];
    const closed = [...document.querySelectorAll('#configuration details')];
    filter.addEventListener('input', () => {
      const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
      if (words.length) for (const one of closed) one.open = true;
    });
  }
  const frames = [...document.querySelectorAll('.viewer input')];
  if (frames.length > 1) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = 'Play';
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; button.textContent = 'Play'; };
    button.addEventListener('click', () => {
      if (timer) return stop();
      let at = 0;
      frames[0].checked = true;
      button.textContent = 'Stop';
      timer = setInterval(() => {
        at += 1;
        if (at >= frames.length) return stop();
        frames[at].checked = true;
      }, 700);
    });
    for (const one of frames) one.addEventListener('change', stop);
    document.querySelector('.viewer .frames').before(button);
  }
})();
"""
