"""Reports: read and pool the records of runs, draw them as SVG, and write one HTML page that needs no network."""
