{{/*
Name of a component, which is also the id of its job. Context: root, component. At most 40 characters: objects add endings. A long name of a
release is cut, and not the component, so that the components of a release have different names.
*/}}
{{- define "ludus.name" -}}
{{- $release := .root.Release.Name | trunc (int (sub 39 (len .component))) | trimSuffix "-" -}}
{{- (index .root.Values .component).name | default (printf "%s-%s" $release .component) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Annotations by which changed files restart the pods of a Deployment; the template of a Job must not change. Context: the root. */}}
{{- define "ludus.checksums" -}}
{{- with .Values.files }}
checksum/files: {{ toJson . | sha256sum | quote }}
{{- end }}
{{- end -}}

{{/* Labels by which pods of a role are selected. Context: name, role. */}}
{{- define "ludus.selector" -}}
ludus.dev/job: {{ .name }}
ludus.dev/role: {{ .role }}
{{- end -}}

{{/* Labels of a pod. Context: root, name, role. */}}
{{- define "ludus.podLabels" -}}
app.kubernetes.io/name: ludus
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/component: {{ .role }}
{{ include "ludus.selector" . }}
{{- end -}}

{{/* Labels of an object. Context: root, name, role. */}}
{{- define "ludus.labels" -}}
{{ include "ludus.podLabels" . }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Record by which `ludus jobs status|logs NAME` know the roles. Context: name, main, restart, processes, scaled, place, grace, ttl. */}}
{{- define "ludus.record" -}}
{{- dict "name" .name "main" .main "restart" .restart "processes" .processes "hosts" dict "scaled" .scaled "place" .place
      "grace_s" .grace "submitted_at" 0 "ttl_s" .ttl | toJson -}}
{{- end -}}

{{/* Image of Ludus. Context: root, image (of the component, may be empty). */}}
{{- define "ludus.image" -}}
{{- $own := .image | default dict -}}
{{- $repository := $own.repository | default .root.Values.image.repository -}}
{{- if not $repository }}{{ fail "image.repository is required, for example registry.example.com/ludus" }}{{ end -}}
{{- $repository }}:{{ $own.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- end -}}

{{/* Where runs are kept, as `ludus jobs` shows it. Context: root. */}}
{{- define "ludus.place" -}}
{{- with .root.Values.storage -}}
{{- if .nfs.server }}nfs:{{ .nfs.server }}:{{ .nfs.path }}{{ else if .url }}{{ trimSuffix "/" .url }}{{ else if .existingClaim }}pvc:{{ .existingClaim }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* URL or path of something below the place of runs; empty without a place. Context: root, key. */}}
{{- define "ludus.below" -}}
{{- with .root.Values.storage -}}
{{- if .url -}}
{{- $parts := splitn "?" 2 .url -}}
{{- trimSuffix "/" $parts._0 }}/{{ $.key }}{{ with $parts._1 }}?{{ . }}{{ end -}}
{{- else if or .existingClaim .nfs.server .size }}/runs/{{ $.key }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Key of a file in a ConfigMap: the path if that is a plain name, else with a digest. Context: the path. */}}
{{- define "ludus.fileKey" -}}
{{- $key := regexReplaceAll "[^A-Za-z0-9._-]" (replace "/" "__" .) "_" -}}
{{- if and (eq $key .) (not (contains "__" .)) (le (len .) 200) }}{{ . }}{{ else }}{{ trunc 200 $key }}-{{ sha256sum . | trunc 8 }}{{ end -}}
{{- end -}}

{{/* "true" if `ludus serve` has a certificate, else empty. Context: the root. */}}
{{- define "ludus.serveTls" -}}
{{- if regexMatch "(^| )--tls-cert( |=|$)" (join " " .Values.serve.arguments) }}true{{ end -}}
{{- end -}}
