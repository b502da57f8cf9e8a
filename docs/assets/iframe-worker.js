/* Search in pages opened from disk: a Worker made of an iframe. iframe-worker 1.0.4 by Martin Donath, MIT license, formatted.
   Copyright (c) 2020-2022 Martin Donath. https://github.com/squidfunk/iframe-worker */
"use strict";
(() => {
  function post(data, origin) {
    parent.postMessage(data, origin || "*");
  }
  function load(...urls) {
    return urls.reduce(
      (done, url) =>
        done.then(
          () =>
            new Promise((resolve) => {
              const script = document.createElement("script");
              script.src = url;
              script.onload = resolve;
              document.body.appendChild(script);
            })
        ),
      Promise.resolve()
    );
  }
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.url = url;
      this.onMessage = (event) => {
        if (event.source === this.window) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
          this.onmessage && this.onmessage(event);
        }
      };
      this.onError = (message, filename, lineno, colno, error) => {
        if (filename === `${this.url}`) {
          const event = new ErrorEvent("error", { message, filename, lineno, colno, error });
          this.dispatchEvent(event);
          this.onerror && this.onerror(event);
        }
      };
      const iframe = document.createElement("iframe");
      iframe.hidden = true;
      document.body.appendChild((this.iframe = iframe));
      this.window.document.open();
      this.window.document.write(
        `<html><body><script>postMessage=${post};importScripts=${load};addEventListener("error",({error})=>{parent.dispatchEvent(new ErrorEvent("error",{filename:"${url}",error}))})<\/script><script src=${url}?${+Date.now()}><\/script></body></html>`
      );
      this.window.document.close();
      onmessage = this.onMessage;
      onerror = this.onError;
      this.ready = new Promise((resolve, reject) => {
        this.window.onload = resolve;
        this.window.onerror = reject;
      });
    }
    terminate() {
      this.iframe.remove();
      onmessage = onerror = null;
    }
    postMessage(data) {
      this.ready.catch().then(() => {
        this.window.dispatchEvent(new MessageEvent("message", structuredClone({ data })));
      });
    }
    get window() {
      return this.iframe.contentWindow;
    }
  }
  window.IFrameWorker = IFrameWorker;
  location.protocol === "file:" && (window.Worker = IFrameWorker);
})();
