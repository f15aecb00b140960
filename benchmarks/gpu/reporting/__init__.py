"""Results of the checks, and the table and the page that are made of them."""
