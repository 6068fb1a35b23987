// Renders a chart's templates as Helm does, as far as this chart goes: text/template with those of Helm's functions that
// it uses. Reads {"folder", "values", "release", "chart"} as JSON and writes what each template came to, as JSON.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"text/template"
)

type given struct {
	Folder  string
	Values  map[string]interface{}
	Release map[string]interface{}
	Chart   map[string]interface{}
}

func empty(value interface{}) bool {
	found := reflect.ValueOf(value)
	if !found.IsValid() {
		return true
	}
	switch found.Kind() {
	case reflect.Map, reflect.Slice, reflect.String:
		return found.Len() == 0
	default:
		return found.IsZero()
	}
}

func toJSON(value interface{}) (string, error) {
	var made bytes.Buffer
	writer := json.NewEncoder(&made)
	writer.SetEscapeHTML(false)
	err := writer.Encode(value)
	return strings.TrimSuffix(made.String(), "\n"), err
}

func indent(spaces int, text string) string {
	pad := strings.Repeat(" ", spaces)
	return pad + strings.ReplaceAll(text, "\n", "\n"+pad)
}

func rendered(from given) (map[string]string, error) {
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(template.FuncMap{
		"include": func(name string, data interface{}) (string, error) {
			var made bytes.Buffer
			err := all.ExecuteTemplate(&made, name, data)
			return made.String(), err
		},
		"toYaml":    toJSON, // JSON is YAML
		"toJson":    toJSON,
		"nindent":   func(spaces int, text string) string { return "\n" + indent(spaces, text) },
		"quote":     func(value interface{}) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"sha256sum": func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
		"dict":      func() map[string]interface{} { return map[string]interface{}{} },
		"fail":      func(words string) (string, error) { return "", errors.New(words) },
		"default": func(otherwise interface{}, value interface{}) interface{} {
			if empty(value) {
				return otherwise
			}
			return value
		},
	})
	files, err := filepath.Glob(filepath.Join(from.Folder, "templates", "*"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if _, err := all.New(filepath.Base(file)).Parse(string(content)); err != nil {
			return nil, err
		}
	}
	data := map[string]interface{}{"Values": from.Values, "Release": from.Release, "Chart": from.Chart}
	made := map[string]string{}
	for _, file := range files {
		name := filepath.Base(file)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, name, data); err != nil {
			return nil, err
		}
		// as Helm does with what is missing
		made[name] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return made, nil
}

func main() {
	var from given
	reader := json.NewDecoder(os.Stdin)
	reader.UseNumber()
	if err := reader.Decode(&from); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	made, err := rendered(from)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(made)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
