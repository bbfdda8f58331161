"""Vision towers: how models read images. One file for each family (`families`)."""
