"""Screens: web pages in many themes, drawn by Chromium, with the page's own elements as truth."""
