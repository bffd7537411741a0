from tidebook.cli.app import main

main()
