// The theme that the person chose, before anything is painted.
"use strict";
{
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
}
