"""Programs of the user's: started by the launcher of their choice on one node, watched and measured from outside."""
