"""The tables and figures of the paper, on any BEIR folder, each as a page with a picture."""
