//! The code that README and the pages in docs/ show, a module per page. `scripts/pages` compares each block with these files.
