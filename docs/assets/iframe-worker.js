/* Search from the disk. A browser starts no worker for a page that it read from a file: it runs in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<body></body>";
      this.ready = new Promise(ready => {
        frame.onload = () => {
          const inside = frame.contentWindow, code = inside.document.createElement("script");
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
          code.onload = () => ready(inside);
          code.src = address;
          inside.document.body.append(code);
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
