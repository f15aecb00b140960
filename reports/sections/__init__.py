"""Assembly of the report sections: figures, text and plots."""
