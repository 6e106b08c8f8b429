"""An exception that is handled is nobody's business."""

if __name__ == "__main__":
    try:
        open("not there").close()
    except FileNotFoundError:
        print("made anew")
