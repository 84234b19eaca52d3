"""Each table and figure of the paper, on any BEIR folder, as a page with its picture."""
