// Keeps the secret with which this tab may change something, and goes on to the page that was asked for.
"use strict";
{
  const { secret, target } = document.documentElement.dataset;
  sessionStorage.setItem("secret", secret);
  location.replace(target);
}
