"""What figures show, as data: the HTML page draws it, the JSON form prints it."""
