"""One page about runs: their records read and pooled, drawn as SVG, and laid out as HTML that needs no network."""
